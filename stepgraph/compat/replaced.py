"""Temporarily replaces attributes of modules and classes, for all threads; children of a fork have the originals."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Held while a step is traced or rewritten.
_ONE_THREAD = threading.RLock()

#: What is replaced now: (owner, values before), the latest last.
_replaced: list[tuple[Any, dict[str, Any]]] = []

#: The value before of what a class has from its bases.
_INHERITED = object()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Only one thread at a time is inside: what a trace and its passes replace is replaced for the whole process."""
    with _ONE_THREAD:
        yield


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, names of ``owner``, a module or a class, have other values."""
    inherited = [name for name in values if isinstance(owner, type) and name not in vars(owner)]
    saved = {name: getattr(owner, name) for name in values} | dict.fromkeys(inherited, _INHERITED)
    _replaced.append((owner, saved))
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        _restore(owner, saved)
        _replaced.remove((owner, saved))


def _restore(owner: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if value is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def replaced_functions(owner: Any, **values: Any) -> contextlib.AbstractContextManager[None]:
    """`replaced` for functions of torch. Dynamo lists these once, at its first use; the list is made before they are
    replaced, or it would have the replacements for the rest of the process."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map  # a second to load, which a trace needs at any rate

    get_torch_obj_rule_map()
    return replaced(owner, **values)


def for_this_thread(ours: Callable, plain: Callable) -> Callable:
    """A function that calls ``ours`` in this thread and ``plain`` in others, such as one that loads batches."""
    tracing = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == tracing else plain)(*args, **kwargs)

    return call


def _put_back() -> None:
    """Restore the originals in the child of a fork, such as a data loader's worker that another thread starts during a
    trace."""
    global _ONE_THREAD
    _ONE_THREAD = threading.RLock()  # the thread that held it does not exist in the child
    for owner, saved in reversed(_replaced):
        _restore(owner, saved)


os.register_at_fork(after_in_child=_put_back)
