"""Splits a flat graph into consecutive pieces, and finds the nodes that need the host."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from stepgraph.graph.facts import argument, has_generator, packet
from stepgraph.graph.host_copies import is_host_copy
from stepgraph.graph.provenance import provenance
from stepgraph.kernels import ctc, masked_sum  # noqa: F401  (define operators of torch.ops.stepgraph)
from stepgraph.kernels.moe import grouped

#: Grouped products, torch's and ours.
_GROUPED = (torch.ops.aten._grouped_mm, torch.ops.stepgraph.grouped_mm, torch.ops.stepgraph.grouped_mm_weight)

aten = torch.ops.aten
#: Operators that select by a mask and give a shape that does not depend on it.
_SELECTING = (torch.ops.stepgraph.masked_sum, torch.ops.stepgraph.selected_sum, aten.masked_scatter_backward)
#: Operators whose kernels on a GPU wait for it and that no tag of torch names: ``tests/gpu/test_waits_gpu.py`` runs
#: torch's own list of operators and finds them.
WAITING = {aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor, aten.normal.Tensor_Tensor}
WAITING |= {aten.masked_fill.Tensor, aten.masked_fill_.Tensor}
_CHOLESKY = (aten.cholesky,) if hasattr(aten, "cholesky") else ()  # torch 2.15 has none
for _packet in (
    *(aten._ctc_loss_backward, aten._linalg_check_errors, aten._linalg_eigh, aten._linalg_svd, aten._unique),
    *(*_CHOLESKY, aten.histc, aten.isin, aten.linalg_eig, aten.linalg_matrix_exp, aten.linalg_pinv),
    *(aten.segment_reduce, aten._to_sparse, torch.ops.stepgraph.ctc_loss),
):
    WAITING |= {getattr(_packet, name) for name in _packet.overloads()}
_INDEXINGS = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl, aten._unsafe_index_put)


def split(module: fx.GraphModule, group_of: Callable[[fx.Node], Any]) -> fx.GraphModule:
    """``module`` as a module that calls its pieces in order.

    A piece is a longest run of consecutive operators with equal ``group_of``; the piece's submodule keeps it as
    ``.group``. A getitem stays with the operator it takes apart.
    """
    pieces: dict[fx.Node, int] = {}
    groups: list[Any] = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in pieces:
            pieces[node] = pieces[node.args[0]]
            continue
        group = group_of(node)
        if not groups or groups[-1] != group:
            groups.append(group)
        pieces[node] = len(groups) - 1
    if len(groups) == 1:  # a graph of thousands of nodes, which need not be made again
        result = _calling(module)
    else:
        result = split_module(module, module, pieces.__getitem__, keep_original_order=True)
    for i, group in enumerate(groups):
        getattr(result, f"submod_{i}").group = group
    return result


def _calling(module: fx.GraphModule) -> fx.GraphModule:
    """A module that calls ``module``."""
    graph = fx.Graph()
    inputs = module.graph.find_nodes(op="placeholder")
    graph.output(graph.call_module("submod_0", tuple(graph.node_copy(node) for node in inputs)))
    return fx.GraphModule({"submod_0": module}, graph)


def tensors_of(node: fx.Node) -> Iterable[torch.Tensor]:
    """Fake tensors that the node reads or makes."""
    for n in (node, *node.all_input_nodes):
        value = n.meta.get("val")
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor))


def needs_host(node: fx.Node, gpu: str = "cuda") -> str | None:
    """Why ``node`` cannot be inside a CUDA graph, or None. ``gpu``: the type of device that counts as the GPU."""
    if node.op == "call_module" or node.op in ("placeholder", "get_attr", "output"):
        return None
    # Other operators that may give a shape by values were traced only if here they do not.
    if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()) or _has_symbols(node):
        return "its result depends on values the host must read"
    if has_generator(node):
        return "it draws from a generator of its own, which no CUDA graph advances"
    if is_host_copy(node):
        return None  # into memory that stays
    devices = {t.device.type for t in tensors_of(node)}
    if devices - {gpu}:
        return f"it works on {' and '.join(sorted(devices))} tensors"
    if packet(node) in _SELECTING or _has_mask(node):
        return "the host must read how many elements its mask selects"
    if node.target in WAITING and not _has_bounds(node):
        return "its kernels read values on the host"
    if packet(node) in _GROUPED and not grouped.on_device(node.args[0].meta["val"]):
        return "torch computes grouped products only in bf16 without reading the groups' sizes on the host"
    return None


def _has_bounds(node: fx.Node) -> bool:
    """Whether ``node`` is a histogram between two given values; without them it reads the data's least and greatest."""
    return packet(node) is aten.histc and argument(node, "min") != argument(node, "max")


def _has_mask(node: fx.Node) -> bool:
    """Whether ``node`` reads or writes the elements that a mask selects; one number written there is a masked fill."""
    if packet(node) not in _INDEXINGS:
        return False
    masks = any(i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in node.args[1])
    values = argument(node, "values")
    return masks and (values is None or argument(node, "accumulate") or values.meta["val"].numel() > 1)


def _has_symbols(node: fx.Node) -> bool:
    return any(not isinstance(size, int) for tensor in tensors_of(node) for size in tensor.shape)


def describe(node: fx.Node) -> str:
    """``name (operator) in module path at file:line``."""
    found = provenance(node)
    where = f" in {found.path or 'the model'} at {found.source}" if found else ""
    return f"{node.name} ({node.target}){where}"
