"""Pieces as bytes for another process: the same graph, forms and shared storage; what cannot be packed is said."""

import pytest
import torch
from torch import fx

from stepgraph import compat
from stepgraph.inductor import fusion_guard, tuned_reductions
from stepgraph.inductor.communication import keep_order
from stepgraph.inductor.packed import NotSavable, pack, unpack

aten = torch.ops.aten


def a_piece():
    """Two inputs that share storage, a list among the arguments, and a result of several tensors."""
    mode, graph = compat.FakeTensorMode(), fx.Graph()
    with mode:
        whole = torch.empty(6, 8, dtype=torch.bfloat16)
        values = [whole[:4], whole[2:].t()]
    inputs = [graph.placeholder(f"input_{i}") for i in range(2)]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    t = graph.call_function(aten.permute.default, (inputs[1], [1, 0]))
    total = graph.call_function(aten.add.Tensor, (inputs[0], t), {"alpha": 2})
    cast = graph.call_function(aten._to_copy.default, (total,), {"dtype": torch.float32})
    parts = graph.call_function(aten.split.Tensor, (cast, 2))
    with mode:
        parts.meta["val"] = list(torch.empty(4, 8).split(2))
    graph.output((total, parts))
    return fx.GraphModule({}, graph)


def form(value):
    return value.dtype, value.device, value.shape, value.stride(), value.storage_offset()


def test_a_piece_is_the_same_in_another_process():
    piece = a_piece()
    found, options = unpack(pack(piece, {"fallback_random": True}))
    assert options == {"fallback_random": True}
    assert found.code == piece.code
    assert [(n.op, n.target, n.name) for n in found.graph.nodes] == [
        (n.op, n.target, n.name) for n in piece.graph.nodes
    ]
    forms = [
        [form(v) for n in module.graph.nodes for v in compat.pytree.tree_leaves(n.meta.get("val", []))]
        for module in (piece, found)
    ]
    assert forms[0] == forms[1] and len(forms[0]) == 4
    first, second = (n.meta["val"] for n in found.graph.find_nodes(op="placeholder"))
    assert compat.storage_key(first) == compat.storage_key(second)


def test_rules_for_reductions_go_with_it():
    scope = fusion_guard() | tuned_reductions()
    options = scope.options
    _, found = unpack(pack(a_piece(), options))
    uuids = [each["post_grad_custom_pre_pass"].uuid() for each in (options, found)]
    assert uuids[0] == uuids[1] is not None
    assert found.keys() == options.keys()


def test_operators_that_stay_in_order_go_with_it():
    """The options of a piece that communicates hold operators."""
    options = keep_order({aten.mm.default}, {aten.add.Tensor})
    _, found = unpack(pack(a_piece(), options))
    order, same = (each["_pre_fusion_custom_pass"] for each in (options, found))
    assert found.keys() == options.keys() and order.uuid() == same.uuid()
    assert (same.also, same.lasting) == ({aten.mm.default}, {aten.add.Tensor})


def test_what_has_no_packed_form_is_said():
    piece = a_piece()
    with pytest.raises(NotSavable):
        pack(piece, {"pass": lambda graph: None})
    piece.inner = a_piece()
    with piece.graph.inserting_before():
        piece.graph.get_attr("inner")
    with pytest.raises(NotSavable, match="it calls another graph"):
        pack(piece, {})
