"""A piece of a graph compiled by Inductor, as a module that frees its arguments while it runs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph import compat

#: ``NAME = async_compile.triton('NAME', '''TEXT''', ...)``, or ``cpp_pybinding([...], r'''TEXT''')``.
_DEFINED = re.compile(r"^(\w+) = async_compile\.(\w+)\(.*?r?'''\n(.*?)\n'''", re.MULTILINE | re.DOTALL)
#: Above the lines that it explains: which nodes of the graph they come from.
_COMES_FROM = re.compile(r"\s*# (?:Topologically Sorted )?Source Nodes: \[([^\]]*)\]")
_LONGEST = 20_000  # letters of one kernel that are kept


@dataclass
class Kernel:
    """``nodes``: names of the nodes of the compiled graph that it computes, in its order; empty where Inductor does not
    say, as of C++. ``text``: Triton from ``@triton.jit`` on, or C++."""

    name: str
    text: str
    nodes: list[str]


def kernels_of(source: str) -> list[Kernel]:
    """The kernels of one compiled graph in the order of their definitions; none for an empty ``source``."""
    # Before the first program there may be another, which tunes the same kernels.
    program = source.rpartition('\n"""\n')[2]
    kernels = {name: Kernel(name, _body(text), []) for name, _, text in _DEFINED.findall(program)}
    launch = re.compile(rf"\s*({'|'.join(map(re.escape, kernels))})(?:\.run)?\(") if kernels else None
    named: list[str] = []
    for line in program.splitlines():
        if found := _COMES_FROM.match(line):
            named = [name.strip() for name in found[1].split(",") if name.strip()]
        elif launch is not None and (found := launch.match(line)):
            nodes = kernels[found[1]].nodes
            nodes += [name for name in named if name not in nodes]
            named = []
        elif "extern_kernels." in line or "torch.ops." in line:
            named = []  # a call of another library
    return list(kernels.values())


def _body(text: str) -> str:
    body = text[text.find("@triton.jit") :] if "@triton.jit" in text else text
    return body if len(body) <= _LONGEST else body[:_LONGEST] + "\n..."


#: Takes its arguments in a list, which it empties.
Function = Callable[[list[Any]], Sequence[Any]]


class Compiled(torch.nn.Module):
    """One compiled piece. ``function``: what computes it, if that is compiled already."""

    def __init__(self, piece: fx.GraphModule, config: dict[str, Any], function: Function | None = None):
        super().__init__()
        self.any_length = False  # whether `function` serves batches of other lengths too
        output = piece.graph.output_node()
        self.single = isinstance(output.args[0], fx.Node)
        if self.single:
            output.args = ((output.args[0],),)
            piece.recompile()
        examples = [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")]
        values = [n.meta["val"] if isinstance(n, fx.Node) else None for n in output.args[0]]
        self.names = [n.name for n in piece.graph.nodes if n.op == "call_function"]
        self.strides = [v.stride() if isinstance(v, torch.Tensor) else None for v in values]
        self.padded: list[int] | None = None
        self.function = function or compat.inductor_compile(piece, examples, config)

    def kernels(self) -> list[Kernel]:
        """What Inductor generated; its nodes are among `names`, the operators of the piece in their order."""
        return kernels_of(compat.inductor_source(self.function))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.boxed(list(args))

    def boxed(self, args: list[torch.Tensor]) -> Any:
        """Run on ``args`` and empty the list, so that each tensor can be freed after its last use."""
        results = self.function(args)
        if self.padded is None:  # shapes are static: what one call gives, every call gives
            self.padded = [i for i, want in enumerate(self.strides) if want and _differs(results[i], want)]
        if self.padded:
            results = self._with_strides(results)
        return results[0] if self.single else results

    def _with_strides(self, results: Sequence[Any]) -> list[Any]:
        """``results`` in the strides that the graph records, which the pieces that read them were compiled for.

        Inductor pads matrix products of odd widths (``shape_padding``) before it notes which strides its outputs must
        have, so a product that leaves a piece comes as a slice of a wider one.
        """
        results = list(results)
        for i in self.padded:
            given = results[i]
            results[i] = torch.empty_strided(
                given.shape, self.strides[i], dtype=given.dtype, device=given.device
            ).copy_(given)
        return results


def _differs(given: torch.Tensor, want: tuple[int, ...]) -> bool:
    """Whether ``given`` lies otherwise in memory than ``want`` says. What is expanded (stride 0) may lie anyhow."""
    dims = [(mine, theirs) for mine, theirs, size in zip(given.stride(), want, given.shape, strict=True) if size > 1]
    return all(theirs for _, theirs in dims) and any(mine != theirs for mine, theirs in dims)
