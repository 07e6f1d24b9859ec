"""Defines operators of ``torch.ops.stepgraph`` by their plain-torch form, most of them with a Triton kernel."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from stepgraph.kernels.ahead import launching


def operator(
    like: Callable[..., Any],
    *,
    launch: str | Callable[..., Any] = "",
    takes: Callable[[torch.Tensor], Any] = lambda x: x.is_cuda,
    check: Callable[..., None] = lambda *_: None,
    writes: Iterable[str] = (),
    name: str = "",
) -> Callable[[Callable[..., Any]], Any]:
    """Define the operator ``name`` (by default the decorated function's). The function is its plain-torch form, and its
    annotations are the schema. The decorator returns the operator; ``register_autograd`` of that adds a gradient.

    Args:
        like: makes the empty results for fake tensors.
        launch: runs in place of the function where ``takes`` is true of the first argument, with its device current. A
            function, or for our Triton kernels ``module:function`` below `stepgraph.kernels`: the module is imported at
            the first call, because a CPU run may lack triton.
        check: raises ``ValueError`` for arguments that are not allowed, also when they are fake.
        writes: names of the arguments that are written.
    """

    def define(function: Callable[..., Any]) -> Any:
        own, defaults = name or function.__name__, function.__defaults__ or ()
        count = len(inspect.signature(function).parameters)

        def checked(run: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any) -> Any:
                if len(args) < count:  # torch leaves out what equals its default
                    args += defaults[len(args) - count :]
                check(*args)
                return run(*args)

            return call

        def run(*args: Any) -> Any:
            if not launch or not takes(args[0]):
                return function(*args)
            kernel = _found(launch) if isinstance(launch, str) else launch
            with torch.cuda.device(args[0].device):
                return kernel(*args)

        made = torch.library.custom_op(f"stepgraph::{own}", checked(run), mutates_args=writes)
        made.register_fake(checked(like))
        if launch and isinstance(launch, str):  # by the arguments of a node, some of them by name
            bind = inspect.signature(function).bind
            launching(own)(lambda *args, **named: checked(run)(*bind(*args, **named).args))
        return made

    return define


@functools.cache
def _found(launch: str) -> Callable[..., Any]:
    module, _, name = launch.partition(":")
    return getattr(importlib.import_module(f"stepgraph.kernels.{module}"), name)
