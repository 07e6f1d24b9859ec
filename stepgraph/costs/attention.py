"""The cost of attention by measured backend: milliseconds, stored as the share of the GPU's peak reached.

The figures are from one H200, torch 2.11, bf16, causal. They serve other GPUs of its compute capability by the
share of the peak. Between measured lengths the share is interpolated in the logarithm of the length; beyond them the
nearest measured one holds, as far as `covers` says. What was not measured has no cost that passes decide by; a forecast
(`reached`) takes the nearest measured width and counts what kernels compute of a shape beyond what is asked for.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from stepgraph.costs.flops import BACKWARD, FORWARD, attention_flops
from stepgraph.costs.hardware import GPUS, Gpu, interpolated
from stepgraph.graph.facts import argument
from stepgraph.graph.host_copies import device_bytes
from stepgraph.graph.marks import VISIBLE_PAIRS
from stepgraph.kernels.lora.gated import backward_workspace

aten, ours, higher_order = torch.ops.aten, torch.ops.stepgraph, torch.ops.higher_order

Backend = Literal["cudnn", "flash2", "fa4", "flex"]
Direction = Literal["forward", "backward"]

_FLEX = (higher_order.flex_attention, higher_order.flex_attention_backward)

#: Operator -> the backend whose kernel it is, and its direction.
OPERATORS: dict[object, tuple[Backend, Direction]] = {
    aten._scaled_dot_product_cudnn_attention.default: ("cudnn", "forward"),
    aten._scaled_dot_product_cudnn_attention_backward.default: ("cudnn", "backward"),
    aten._scaled_dot_product_flash_attention.default: ("flash2", "forward"),
    aten._scaled_dot_product_flash_attention_backward.default: ("flash2", "backward"),
    ours.flash4_attention.default: ("fa4", "forward"),
    ours.flash4_attention_backward.default: ("fa4", "backward"),
    _FLEX[0]: ("flex", "forward"),
    _FLEX[1]: ("flex", "backward"),
}

#: The same of FlashAttention 2 with a window, which takes (B, T, H, head_dim).
_WINDOWED: dict[object, tuple[Backend, Direction]] = {
    aten._flash_attention_forward.default: ("flash2", "forward"),
    aten._flash_attention_backward.default: ("flash2", "backward"),
}


@dataclass(frozen=True)
class Case:
    """One attention: queries (batch, heads, queries, width), keys (batch, kv_heads, keys, width), values
    (batch, kv_heads, keys, value_width), all of ``dtype``. ``masked``: a mask is added, or dropout drawn."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    causal: bool
    dtype: torch.dtype
    masked: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        length = f"{self.queries}" if self.queries == self.keys else f"{self.queries}/{self.keys}"
        width = f"{self.width}" if self.width == self.value_width else f"{self.width}/{self.value_width}"
        extra = ", causal" * self.causal + ", masked" * self.masked
        return f"{self.batch} x {heads} heads x {length} x {width} in {str(self.dtype).removeprefix('torch.')}{extra}"


@dataclass(frozen=True)
class _Measured:
    """Milliseconds of one causal attention in bf16 of ``rows`` = batch x heads."""

    backend: Backend
    rows: int
    length: int
    width: int
    value_width: int
    forward: float
    backward: float


#: The GPU of the figures.
_GPU = GPUS["h200"]

_MEASURED = (
    # 4 x 32/8 heads x 4096 x 64
    _Measured("cudnn", 128, 4096, 64, 64, 0.65, 1.89),
    _Measured("fa4", 128, 4096, 64, 64, 0.57, 1.58),
    _Measured("flash2", 128, 4096, 64, 64, 0.98, 3.06),
    _Measured("flex", 128, 4096, 64, 64, 0.80, 2.69),
    # 32 x 8 heads x 2048 x 64
    _Measured("cudnn", 256, 2048, 64, 64, 0.35, 1.07),
    _Measured("fa4", 256, 2048, 64, 64, 0.35, 0.86),
    # 1 x 32/8 heads x 8192 x 128
    _Measured("cudnn", 32, 8192, 128, 128, 0.99, 2.92),
    _Measured("fa4", 32, 8192, 128, 128, 0.83, 2.60),
    _Measured("flash2", 32, 8192, 128, 128, 1.77, 4.98),
    _Measured("flex", 32, 8192, 128, 128, 1.39, 4.09),
    # 4 x 16 heads x 4096, keys of 192 and values of 128 channels, as in DeepSeek-V3; the same of 256
    _Measured("cudnn", 64, 4096, 192, 128, 0.62, 2.18),
    _Measured("fa4", 64, 4096, 192, 128, 0.52, 2.07),
    _Measured("cudnn", 64, 4096, 256, 256, 0.90, 3.96),
    _Measured("fa4", 64, 4096, 256, 256, 0.79, 4.09),
)

#: A figure holds for attention that fills the GPU as well: not under half the length, nor a quarter of the queries.
_LEAST_LENGTH, _LEAST_QUERIES = 1 / 2, 1 / 4


def case_of(node: fx.Node) -> Case:
    """The case of an operator that takes ``query``, ``key`` and ``value`` as (B, H, T, head_dim), either direction."""
    if node.target in _FLEX:
        q, k, v = (n.meta["val"] for n in node.args[:3])
        pairs, seen = q.shape[2] * k.shape[2], node.meta.get(VISIBLE_PAIRS)
        causal, masked = seen == pairs // 2, seen not in (pairs, pairs // 2)
    else:
        q, k, v = (argument(node, name).meta["val"] for name in ("query", "key", "value"))
        causal = bool(argument(node, "is_causal"))
        masked = any(argument(node, name) is not None for name in ("attn_bias", "attn_mask"))
        masked = masked or bool(argument(node, "dropout_p"))
    return Case(*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], v.shape[3], causal, q.dtype, masked)


def work(case: Case, direction: Direction) -> int:
    """Floating-point operations of ``case``."""
    pairs = case.batch * case.heads * case.queries * case.keys
    kinds = FORWARD if direction == "forward" else BACKWARD
    return attention_flops(kinds, pairs, case.width, case.value_width) // (2 if case.causal else 1)


def share(backend: Backend, case: Case, direction: Direction, gpu: Gpu) -> float | None:
    """The share of ``gpu``'s peak that ``backend`` reaches; None where nothing like it was measured."""
    if gpu.capability != _GPU.capability or not (case.causal and case.dtype is torch.bfloat16) or case.masked:
        return None
    alike = [m for m in _MEASURED if (m.backend, m.width, m.value_width) == (backend, case.width, case.value_width)]
    if not any(_covers(m, case) for m in alike):
        return None
    shares = {m.length: _share(m, direction) for m in alike}
    return interpolated(shares, case.queries)


def seconds(backend: Backend, case: Case, gpu: Gpu, *, backward: bool) -> float | None:
    """Seconds of ``case`` forward, with ``backward`` in both directions; None where nothing like it was measured."""
    total = 0.0
    for direction in ("forward", "backward") if backward else ("forward",):
        reached = share(backend, case, direction, gpu)
        if reached is None:
            return None
        total += work(case, direction) / gpu.peak(case.dtype) / reached
    return total


#: Rows and columns of a kernel's tile, which is always computed whole; and the cost of starting and finishing a row of
#: tiles, in keys. Source: the second by steps on an H100 (benchmarks/h100_models_unseen.json): attention of
#: ViT (197 tokens), BERT (512) and Whisper (1,500), forward and backward, is then within 4% of the measurement.
_TILE, _START = 128, 120


def reached(node: fx.Node, gpu: Gpu) -> float | None:
    """The share of ``gpu``'s peak that an operator of attention is forecast to reach; None where its kernel was not
    measured."""
    backend, direction = OPERATORS.get(node.target) or _WINDOWED.get(node.target, (None, "forward"))
    window = node.target in _WINDOWED
    if backend is None or gpu.capability != _GPU.capability:
        return None
    case = _window_case(node) if window else case_of(node)
    if case.dtype not in (torch.bfloat16, torch.float16) or (backend == "flex" and not case.causal):
        return None
    if not work(case, direction):
        return None
    widths = {(m.width, m.value_width) for m in _MEASURED if m.backend == backend}
    sizes = case.width + case.value_width
    nearest = min(widths, key=lambda pair: abs(math.log(sum(pair) / sizes)))
    alike = [m for m in _MEASURED if m.backend == backend and (m.width, m.value_width) == nearest]
    shares = {m.length: _share(m, direction) / _useful(_case(m)) for m in alike}
    sides = [argument(node, f"window_size_{side}") for side in ("left", "right")] if window else None
    return interpolated(shares, case.queries) * _useful(case, sides)


#: Multiprocessors of an H100 and an H200.
_MULTIPROCESSORS = 132


def transient_bytes(node: fx.Node) -> int:
    """Bytes that an operator of attention, or of SwiGLU between adapters, allocates on top of its inputs: its results,
    and in backward a workspace. Attention's holds the gradient of the queries and a sum for each of their rows in fp32,
    and, where query heads share keys and values, gradients of these for every query head. Under deterministic
    algorithms FlashAttention 2 keeps one gradient of the queries for each multiprocessor that works on the same head. 0
    for other operators.

    Source: what torch 2.11 allocated on an H200, 128.5 MiB for 4 x 8/4 heads x 4096 x 128 in bf16 (cuDNN), and 256 MiB
    more in FlashAttention 2's deterministic backward."""
    results = sum(device_bytes(user) for user in node.users if user.target is operator.getitem)
    if node.target is torch.ops.stepgraph.gated_adapters_backward.default:
        return results + backward_workspace(node.args[1].meta["val"], node.args[5].meta["val"])
    backend, direction = OPERATORS.get(node.target) or _WINDOWED.get(node.target, (None, ""))
    if not direction or node.target in _FLEX:
        return 0
    if direction == "forward":
        return results
    q, k, v = (argument(node, name).meta["val"] for name in ("query", "key", "value"))
    heads = -2 if node.target in _WINDOWED else 1
    shared = q.shape[heads] // k.shape[heads] if backend != "fa4" and q.shape[heads] != k.shape[heads] else 0
    copies = 1
    if backend == "flash2" and torch.are_deterministic_algorithms_enabled():
        ends = argument(node, "cum_seq_q")
        ends = ends.meta["val"] if isinstance(ends, fx.Node) else None  # of packed sequences
        batch = q.shape[0] if ends is None else ends.shape[0] - 1
        copies = -(-_MULTIPROCESSORS // (batch * q.shape[heads]))
    sums = 4 * (copies * q.numel() + q.numel() // q.shape[-1])
    return results + sums + shared * (k.numel() + v.numel()) * q.element_size()


def _window_case(node: fx.Node) -> Case:
    q, k, v = (argument(node, name).meta["val"] for name in ("query", "key", "value"))  # (B, T, H, head_dim)
    return Case(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3], False, q.dtype)


def _useful(case: Case, sides: Sequence[int | None] | None = None) -> float:
    """The share of a kernel's time spent on the scores asked for; the rest goes to partial tiles, and to starting and
    finishing rows of tiles. ``sides``: keys that each query sees on either side, where it is a window."""
    queries, keys = (-(-n // _TILE) * _TILE for n in (case.queries, case.keys))
    asked, computed = float(case.keys), float(keys)
    if sides is not None:
        asked = min(1.0 + sum(case.keys if side is None or side < 0 else side for side in sides), asked)
        computed = min(asked + 2 * _TILE - 1, computed)
    elif case.causal:
        asked, computed = asked / 2, (computed + _TILE) / 2
    started = computed if sides is not None else keys
    return case.queries / queries * asked / computed * started / (started + _START)


def _covers(m: _Measured, case: Case) -> bool:
    queries = case.batch * case.heads * case.queries
    long = min(case.queries, case.keys) >= _LEAST_LENGTH * m.length
    return long and queries >= _LEAST_QUERIES * m.rows * m.length


def _case(m: _Measured) -> Case:
    return Case(1, m.rows, m.rows, m.length, m.length, m.width, m.value_width, True, torch.bfloat16)


def _share(m: _Measured, direction: Direction) -> float:
    ms = m.forward if direction == "forward" else m.backward
    return work(_case(m), direction) / (ms / 1e3) / _GPU.peak(torch.bfloat16)
