"""Column sums of mixed-order reductions, finished in one launch.

A mixed-order reduction of Inductor's leaves one partial column sum per program. Inductor adds them up with torch's sum,
in float32, and casts the result in another kernel: two launches, which on small tensors take a third as long as the
reduction itself. Here a sum that is only read by a cast gets the dtype of the cast, and one kernel adds up the parts.
"""

import re
from typing import Any

import torch
from torch import fx

import stepgraph.kernels.norm.column_sum  # noqa: F401  (registers the operator that generated code calls)
from stepgraph import compat

aten = torch.ops.aten
parts = compat.inductor()

_VIEWS = (aten.view.default, aten.reshape.default, aten.squeeze.dim)
_NARROW = (torch.bfloat16, torch.float16)
#: ``buf = workspace[start : end].view(parts, columns).sum(dim=0)``, perhaps viewed, perhaps cast.
_FINISH = re.compile(
    r"(\w+) = (\w+\[[^\]]*\]\.view\([^()]*\))\.sum\(dim=0\)(\.view\(\[[^\]]*\]\))?(?:\.to\((torch\.\w+)\))?"
)


def narrow(graph: fx.Graph) -> None:
    """Let a column sum that is only read by a cast to a narrow dtype, and returned so, have that dtype itself: it is
    still added in float32, and rounded once."""
    if parts.config.emulate_precision_casts or not parts.config.triton.codegen_upcast_to_fp32:
        return  # a narrow sum would then round what it adds
    for cast in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
        chain = [cast.args[0]]
        while chain[-1].target in _VIEWS and len(chain[-1].users) == 1:
            chain.append(chain[-1].args[0])
        # Only returned: what is read here too, Inductor rounds as eager does where it is saved for backward.
        returned = all(user.op == "output" for user in cast.users)
        if returned and cast.args[1] in _NARROW and _sums_columns(chain[-1]):
            chain[-1].kwargs = {"dtype": cast.args[1]}
            for node in chain:
                if "val" in node.meta:
                    node.meta["val"] = node.meta["val"].to(cast.args[1])
            cast.replace_all_uses_with(chain[0])
            graph.erase_node(cast)


def _sums_columns(node: fx.Node) -> bool:
    """Whether the node is a float32 sum over all dimensions but the last, and is read once."""
    if node.target is not aten.sum.dim_IntList or node.kwargs or len(node.users) != 1:
        return False
    added, dims = node.args[0].meta.get("val"), node.args[1]
    if added is None or added.dtype is not torch.float32 or added.ndim < 2 or not dims:
        return False
    return {dim % added.ndim for dim in dims} == set(range(added.ndim - 1))


def finished(line: Any) -> Any:
    """``line`` of generated code; where it adds up the parts of a sum, one kernel does so."""
    found = _FINISH.fullmatch(line) if isinstance(line, str) else None
    if found is None:
        return line
    name, source, view, dtype = found.groups()
    if view is None:  # torch 2.11 drops the dimensions of size 1 that the sum keeps
        view = f".view({[int(size) for size in parts.V.graph.get_buffer(name).get_layout().size]})"
    return f"{name} = torch.ops.stepgraph.column_sum({source}, {dtype or 'torch.float32'}){view}"
