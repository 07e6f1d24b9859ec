"""Weights in 4 bits that bitsandbytes holds, dequantized in our kernel.

Matches its operators, in models that transformers loaded with a ``BitsAndBytesConfig``. Before -> after:
    gemm_4bit(x, codes)                                          -> x dequantize_4bit(codes)^T
    dequantize_4bit(codes, dequantize_blockwise(absmax) + offset) -> dequantize_4bit(codes), scales in the same kernel
Tier numerics: the values of weights keep their bits, and a product of few rows, for which bitsandbytes has a kernel of
its own, rounds differently. Preconditions: NF4 in bytes. What is in FP4, or stored in another dtype, is left unchanged.
Source: `stepgraph.kernels.quant.nf4`.
"""

from typing import NamedTuple

import torch
from torch import fx

from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.facts import argument, is_overload
from stepgraph.kernels.quant import nf4
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph


@register("bitsandbytes_4bit", "numerics")
def bitsandbytes_4bit(step: StepGraph, options: object, report: PassReport) -> None:
    """Dequantize bitsandbytes' weights in our kernel, scales included."""
    left = set()
    for node in list(step.graph.nodes):
        name = _name(node)
        if name not in ("gemm_4bit", "dequantize_4bit"):
            continue
        report.matched += 1
        product = name == "gemm_4bit"
        codes = argument(node, "B" if product else "A")
        kind = argument(node, "quant_type")
        if kind != "nf4" or codes.meta["val"].dtype != torch.uint8:
            left.add(f"{kind} in {codes.meta['val'].dtype}")
            continue
        scales = _of_product(node) if product else _of_dequantization(node)
        build = Builder(node, before=node)
        shape = list(argument(node, "shapeB" if product else "shape"))
        form = argument(node, "blocksize"), shape, node.meta["val"].dtype
        table = _table(step, node)
        weight = build(ours.dequantize_4bit.default, codes, scales.absmax, table, list(scales.nested), *form)
        replace(node, _multiply(build, node, weight) if product else weight)
        for unread in scales.unread:
            if not unread.users:
                step.graph.erase_node(unread)
        report.changed += 1
    report.summary = (
        f"{report.changed} of {report.matched} bitsandbytes operators on 4-bit weights replaced by our kernel"
    )
    report.notes += [f"left to bitsandbytes: weights of {what}" for what in sorted(left)]


class _Scales(NamedTuple):
    """Arguments of `nf4.dequantize_4bit`; ``unread``: nodes that made them for bitsandbytes, last one first."""

    absmax: fx.Node
    nested: tuple[fx.Node, ...] = ()
    unread: tuple[fx.Node, ...] = ()


def _name(node: fx.Node) -> str:
    """The name of an operator of bitsandbytes, "" for all else."""
    return node.target.overloadpacket.__name__ if is_overload(node) and node.target.namespace == "bitsandbytes" else ""


def _of_product(node: fx.Node) -> _Scales:
    absmax, small = argument(node, "absmax"), argument(node, "absmax_8bit")
    if small is None:
        return _Scales(absmax)
    return _Scales(small, (absmax, argument(node, "absmax_code"), argument(node, "absmax_offset")))


def _of_dequantization(node: fx.Node) -> _Scales:
    absmax = argument(node, "absmax")
    whole = absmax.args[0] if absmax.target in (aten.add_.Tensor, aten.add.Tensor) else None
    if not isinstance(whole, fx.Node) or _name(whole) != "dequantize_blockwise" or absmax.kwargs:
        return _Scales(absmax)
    block = argument(whole, "blocksize")
    if block != nf4.NESTED_BLOCK or list(absmax.users) != [node] or list(whole.users) != [absmax]:
        return _Scales(absmax)
    nested = argument(whole, "absmax"), argument(whole, "code"), absmax.args[1]
    return _Scales(argument(whole, "A"), nested, (absmax, whole))


def _table(step: StepGraph, node: fx.Node) -> fx.Node:
    """The 16 values, a constant of the graph on the device of ``node``."""
    device, mode = node.meta["val"].device, node.meta["val"].fake_mode
    name = f"_nf4_{str(device).replace(':', '_')}"
    if not hasattr(step.module, name):
        step.module.register_buffer(name, nf4.normal_map().to(device), persistent=False)
    with step.graph.inserting_before(node):
        table = step.graph.get_attr(name)
    table.meta["val"] = mode.from_tensor(getattr(step.module, name))
    return table


def _multiply(build: Builder, node: fx.Node, weight: fx.Node) -> fx.Node:
    """x W^T, plus a bias if any, as ``nn.Linear`` is traced."""
    x, bias = argument(node, "A"), argument(node, "bias")
    rows = build.view(x, (-1 if x.meta["val"].ndim != 2 else x.meta["val"].shape[0], x.meta["val"].shape[-1]))
    across = build(aten.t.default, weight)
    y = build(aten.mm.default, rows, across) if bias is None else build(aten.addmm.default, bias, rows, across)
    return build.view(y, node.meta["val"].shape)
