"""A piece of a graph compiled by Inductor, as a module that frees its arguments while it runs."""

from typing import Any

import torch
from torch import fx

from stepgraph import compat


class Compiled(torch.nn.Module):
    """One compiled piece."""

    def __init__(self, piece: fx.GraphModule, config: dict[str, Any]):
        super().__init__()
        output = piece.graph.output_node()
        self.single = isinstance(output.args[0], fx.Node)
        if self.single:
            output.args = ((output.args[0],),)
            piece.recompile()
        examples = [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")]
        self.function = compat.inductor_compile(piece, examples, config)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.boxed(list(args))

    def boxed(self, args: list[torch.Tensor]) -> Any:
        """Run on ``args`` and empty the list, so that each tensor can be freed after its last use."""
        results = self.function(args)
        return results[0] if self.single else results
