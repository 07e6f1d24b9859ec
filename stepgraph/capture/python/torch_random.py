"""torch's random generators in a step: it draws from them in order, and forward may not seed or rewind them.

A graph draws from the default generators and from the ones that a model passes to operators, as eager does. What Python
does to their states while a step is traced would happen once, and never again.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.python.values import counts
from stepgraph.capture.recorder import Recorder
from stepgraph.errors import CaptureError, MovedError
from stepgraph.graph.facts import has_generator
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import provenance

_SEEDING_GPUS = ("manual_seed", "seed", "set_rng_state", "manual_seed_all", "seed_all", "set_rng_state_all")
#: Methods of a generator that read or set its state.
_METHODS = ("get_state", "set_state", "graphsafe_get_state", "graphsafe_set_state", "clone_state", "get_offset")
_METHODS += ("set_offset", "initial_seed", "manual_seed", "seed")
#: A seed that no model takes.
_MARK = 0x5EED_0F_57E9

_FIX = "seed before the first step, or draw outside and pass the numbers in the batch"


@contextlib.contextmanager
def refusing_seeds(recorder: Recorder) -> Iterator[None]:
    """Inside, `CaptureError` is raised for code that sets the state of torch's default generators, or reads it or their
    seed. torch itself does so for a GPU, to give the ranks of a DTensor their parts."""

    tracing = threading.get_ident()

    def refuse(verb: str, given: Callable | None, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        elsewhere = threading.get_ident() != tracing
        if given is not None and (elsewhere or not counts(frame.f_code.co_filename)):
            return given(*args, **kwargs)
        raise CaptureError(
            f"{recorder.where(frame)} {verb} of torch's random generator, which a captured step would not repeat; "
            f"{_FIX}"
        )

    class Refusing:
        """The default generator for torch's functions, whatever the names that they are called by."""

        def __getattr__(self, name: str) -> Any:
            elsewhere = threading.get_ident() != tracing
            if elsewhere or (name == "get_state" and not counts(sys._getframe(2).f_code.co_filename)):
                return getattr(torch.default_generator, name)
            verbs = {"initial_seed": "reads the seed", "get_state": "reads the state"}
            return refuse(verbs.get(name, "sets the state"), None)

    of_gpus = {name: partial(refuse, "sets the state", getattr(torch.cuda, name)) for name in _SEEDING_GPUS}
    of_gpus |= {
        name: partial(refuse, f"reads the {what}", getattr(torch.cuda, name))
        for name, what in (("initial_seed", "seed"), ("get_rng_state", "state"))
    }
    with compat.without_modes():
        before = torch.default_generator.get_state()
    with (
        compat.replaced(torch.random, default_generator=Refusing()),
        compat.replaced_functions(torch.cuda, **of_gpus),
        compat.replaced_functions(torch.cuda.random, **of_gpus),
    ):
        yield
    with compat.without_modes():
        moved = not torch.equal(before, torch.default_generator.get_state())
        torch.default_generator.set_state(before)
    if moved:
        raise MovedError(
            "forward or the loss sets the state of torch.default_generator by a method of it, which a captured step "
            f"would not repeat; {_FIX}"
        )


class GeneratorCalls:
    """Methods of a ``torch.Generator`` that read or set its state, called from Python in a step whose code meets one.
    They are written in C and found by a profile function of Python, which slows a trace: it runs only there."""

    def __init__(self) -> None:
        self._met, self._look = False, None

    def meet(self) -> None:
        """Code of the step reads a generator, or may."""
        self._met = True
        if self._look is not None and sys.getprofile() is None:
            sys.setprofile(self._look)

    @contextlib.contextmanager
    def refused(self, recorder: Recorder) -> Iterator[None]:
        """Inside, such a call raises `CaptureError`."""

        def look(frame: Any, event: str, called: Any) -> None:
            of_generator = event == "c_call" and isinstance(getattr(called, "__self__", None), torch.Generator)
            if of_generator and called.__name__ in _METHODS and counts(frame.f_code.co_filename):
                raise CaptureError(
                    f"{recorder.where(frame)} calls {called.__name__}() of a torch.Generator, which a captured step "
                    f"would not repeat; {_FIX}"
                )

        self._look = look
        if self._met:
            self.meet()
        try:
            yield
        finally:
            self._look = None
            if sys.getprofile() is look:
                sys.setprofile(None)


def _generators(program: StepProgram) -> list[torch.Generator]:
    return list({id(generator): generator for _, generator in _draws(program)}.values())


def _draws(program: StepProgram) -> Iterator[tuple[fx.Node, torch.Generator]]:
    """The nodes that are given a generator, with it. Newer versions of torch hold it in an attribute of the module."""
    for graph in program.graphs.values():
        for node in graph.graph.nodes:
            if has_generator(node):
                given = node.kwargs["generator"]
                yield node, getattr(graph.module, given.target) if isinstance(given, fx.Node) else given


def checked_generators(program: StepProgram, trace: Callable[[], StepProgram]) -> list[torch.Generator]:
    """The generators that operators of ``program`` are given, each once, in order. Raises if forward makes or seeds
    one of them. ``trace``: traces the step again."""
    generators = _generators(program)
    if not generators:
        return []
    saved = [g.get_state() for g in generators]
    try:
        marks = [g.manual_seed(_MARK).get_state() for g in generators]
        again = _generators(trace())
        same = len(again) == len(generators) and all(a is b for a, b in zip(again, generators, strict=True))
        seeded = not same or any(not torch.equal(g.get_state(), mark) for g, mark in zip(again, marks, strict=True))
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.set_state(state)
    if seeded:
        place = provenance(next(node for node, _ in _draws(program))).place
        raise CaptureError(
            f"{place} draws from a torch.Generator that forward makes or seeds, which a captured step would not do "
            f"again; {_FIX}"
        )
    return generators
