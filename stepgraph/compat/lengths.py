"""Symbolic sizes: a length that the compiler keeps open, and what it assumed of it."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


class SymbolicLength:
    """A length of at least 2 that is open. ``symbol``: a ``torch.SymInt`` whose value is ``hint`` where one is needed.
    ``mode``: the fake mode whose tensors may have it as a size."""

    def __init__(self, hint: int):
        from torch._dynamo.source import ConstantSource  # imports Dynamo and Inductor, which takes seconds

        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        fake = self.mode.from_tensor(torch.empty(hint), source=ConstantSource("length"), symbolic_context=context)
        self.symbol = fake.shape[0]
        self._expression = self.symbol.node.expr

    def may_be(self, length: int) -> bool:
        """Whether everything that was assumed of the length so far holds for ``length``."""
        guards = (guard.expr for guard in self.mode.shape_env.guards)
        return length > 1 and all(bool(expr.xreplace({self._expression: length}) == True) for expr in guards)  # noqa: E712


def keep_mode(output: torch.fx.Node, mode: FakeTensorMode) -> None:
    """Let Inductor compile the graph that ends in ``output`` with the symbols of ``mode``: it asks a result for it."""
    with mode:
        output.args[0][0].meta["example_value"] = torch.empty(())
