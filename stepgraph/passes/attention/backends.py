"""The backends of attention: what each supports, whether its backward is deterministic, and its nodes in the graph.

    cudnn    torch's cuDNN attention
    flash2   torch's FlashAttention 2
    fa4      FlashAttention 4, the optional package ``flash-attn-4``
    flex     FlexAttention's kernels, which Inductor makes: causal, or a window; see `flex`

The rules hold in every supported torch. On a GPU torch is asked as well, which knows its version, the
GPU, and what the user switched off (``torch.backends.cuda.enable_cudnn_sdp`` and its like).
Source: torch's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
"""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import fx

from stepgraph.costs.attention import Backend, Case
from stepgraph.graph.edit import Builder
from stepgraph.graph.facts import argument

aten, ours = torch.ops.aten, torch.ops.stepgraph

BACKENDS: tuple[Backend, ...] = get_args(Backend)

#: Whether backward gives the same bits in every run.
REPEATS = {
    "cudnn": "cudnn: torch does not promise a deterministic backward",
    "flash2": "flash2: backward is deterministic only under torch.use_deterministic_algorithms",
    "fa4": "fa4: backward is deterministic only if torch.use_deterministic_algorithms is on at the capture",
    "flex": "flex: backward is deterministic: its kernels add in a fixed order, without atomics",
    "efficient": "efficient: backward is deterministic only under torch.use_deterministic_algorithms",
}

#: Widths of heads (of queries and keys, of values) beyond 128 that cuDNN and, on Blackwell, FlashAttention 4 take.
_WIDE = ((192, 128), (256, 256))


def torch_order(capability: tuple[int, int] | None) -> tuple[Backend, ...]:
    """The order in which torch tries backends on a GPU of this capability."""
    hopper_or_blackwell = capability is not None and capability[0] in (9, 10)
    return ("cudnn", "flash2") if hopper_or_blackwell else ("flash2", "cudnn")


def refusal(
    backend: Backend, case: Case, capability: tuple[int, int] | None, deterministic: bool = False
) -> str | None:
    """Why ``backend`` does not take ``case`` on a GPU of ``capability`` (None: not known), or None."""
    if backend == "flex":
        return _flex(case, capability)
    if case.masked:
        return "it has a mask or dropout"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {str(case.dtype).removeprefix('torch.')}, and {backend} in bfloat16 or float16"
    if case.width % 8 or case.value_width % 8:
        return f"8 does not divide heads of {_widths(case)} channels"
    if case.heads % case.kv_heads:
        return f"{case.kv_heads} heads of keys do not divide {case.heads} of queries"
    if backend != "cudnn" and case.causal and case.queries != case.keys:
        return f"it is causal with {case.queries} queries and {case.keys} keys"
    return _too_old(backend, capability) or _OWN_RULES[backend](case, capability, deterministic)


def _too_old(backend: Backend, capability: tuple[int, int] | None) -> str | None:
    if capability is not None and capability < (8, 0):
        return f"the GPU has compute capability {_dotted(capability)}, and {backend} needs 8.0"
    return None


def _flex(case: Case, capability: tuple[int, int] | None) -> str | None:
    """Why FlexAttention cannot compute ``case``, or None. Callers check mask and dropout, which need the graph."""
    if case.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in {str(case.dtype).removeprefix('torch.')}, and flex in bfloat16, float16 or float32"
    if not 16 <= min(case.width, case.value_width) <= max(case.width, case.value_width) <= 256:
        return f"FlexAttention takes heads of 16 to 256 channels, not of {_widths(case)}"
    if not case.kv_heads or case.heads % case.kv_heads:
        return f"{case.kv_heads} heads of keys do not divide {case.heads} of queries"
    if not case.batch * case.heads * case.queries * case.keys:
        return "it is empty"
    return _too_old("flex", capability)


def _cudnn(case: Case, capability: tuple[int, int] | None, deterministic: bool) -> str | None:
    if deterministic:
        return "torch.use_deterministic_algorithms is on, and torch counts cuDNN's attention out then"
    wide = (case.width, case.value_width) in _WIDE and (capability is None or capability[0] in (9, 10))
    if max(case.width, case.value_width) > 128 and not wide:
        return f"cuDNN takes no heads of {_widths(case)} channels here"
    return "cuDNN takes no single key" if case.keys == 1 else None


def _flash2(case: Case, capability: tuple[int, int] | None, deterministic: bool) -> str | None:
    if case.width != case.value_width or case.width > 256:
        return f"FlashAttention 2 takes heads of one width up to 256 channels, not of {_widths(case)}"
    return None


def _fa4(case: Case, capability: tuple[int, int] | None, deterministic: bool) -> str | None:
    if capability is not None and capability[0] not in (9, 10):
        return f"FlashAttention 4 needs compute capability 9 or 10, and the GPU has {_dotted(capability)}"
    most = 256 if capability is None or capability[0] == 9 else 128
    if max(case.width, case.value_width) > most and (case.width, case.value_width) not in _WIDE:
        return f"FlashAttention 4 takes no heads of {_widths(case)} channels here"
    return None


_OWN_RULES: dict[Backend, Callable[[Case, tuple[int, int] | None, bool], str | None]] = {
    "cudnn": _cudnn,
    "flash2": _flash2,
    "fa4": _fa4,
}


def torch_refuses(backend: Backend, forward: fx.Node, differentiable: bool) -> str | None:
    """Why the torch at hand does not run the attention ``forward``, without mask and dropout, by ``backend`` on the GPU
    at hand; None where it does, and for a backend that torch does not choose."""
    asked = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash2": torch.backends.cuda.can_use_flash_attention,
    }.get(backend)
    if asked is None:
        return None
    values = [argument(forward, name).meta["val"] for name in ("query", "key", "value")]
    with values[0].fake_mode, torch.enable_grad():
        values = [value.detach().requires_grad_(differentiable) for value in values]
        grouped = values[0].shape[1] != values[1].shape[1]
        params = torch.backends.cuda.SDPAParams(*values, None, 0.0, bool(argument(forward, "is_causal")), grouped)
        if asked(params):
            return None
    return f"torch {torch.__version__} does not run it by {backend} on this GPU, or it is off in torch.backends.cuda"


def unaligned(forward: fx.Node) -> bool:
    """Whether rows of queries, keys or values do not begin at multiples of 16 bytes, or share memory."""
    return any(odd_rows(argument(forward, name).meta["val"]) for name in ("query", "key", "value"))


def odd_rows(value: torch.Tensor) -> bool:
    """`unaligned`, of ``value``: (batch, heads, length, width) in 16 bits."""
    strides = [s for size, s in zip(value.shape[:3], value.stride()[:3], strict=True) if size > 1]
    return value.stride(3) != 1 or bool(value.storage_offset() % 8) or any(not s or s % 8 for s in strides)


# Their nodes


def forward_nodes(
    backend: Backend,
    build: Builder,
    inputs: Sequence[fx.Node],
    causal: bool,
    scale: float | None,
    saves: bool,
    bias: fx.Node | None = None,
) -> list[fx.Node]:
    """The forward of ``inputs`` (q, k and v) by ``backend``, not flex: (its result, and what its backward reads).
    ``saves``: there is a backward. ``bias``: what cuDNN's and the memory-efficient kernel add to the scores."""
    if backend == "cudnn":
        made = build(
            aten._scaled_dot_product_cudnn_attention.default, *inputs, bias, saves, 0.0, causal, False, scale=scale
        )
        parts = (0, 1, 6, 7)
    elif backend == "efficient":
        made = build(
            aten._scaled_dot_product_efficient_attention.default, *inputs, bias, saves, 0.0, causal, scale=scale
        )
        parts = (0, 1, 2, 3)
    elif backend == "flash2":
        made = build(aten._scaled_dot_product_flash_attention.default, *inputs, 0.0, causal, False, scale=scale)
        parts = (0, 1, 6, 7)
    else:
        made = build(ours.flash4_attention.default, *inputs, scale, causal)
        parts = (0, 1)
    return build.parts(made, *(parts if saves else parts[:1]))


def backward_nodes(
    backend: Backend,
    build: Builder,
    grad: fx.Node,
    inputs: Sequence[fx.Node],
    saved: Sequence[fx.Node],
    causal: bool,
    scale: float | None,
    deterministic: bool = False,
    bias: fx.Node | None = None,
    of_bias: bool = False,
) -> list[fx.Node]:
    """The gradients of ``inputs``, and where ``of_bias`` of the ``bias``, by ``backend``, from ``grad`` of the result
    and what `forward_nodes` gave."""
    lengths = [inputs[i].meta["val"].shape[2] for i in (0, 1)]
    if backend == "cudnn":
        out, log_sum, seed, offset = saved
        made = build(
            aten._scaled_dot_product_cudnn_attention_backward.default,
            grad, *inputs, out, log_sum, seed, offset, bias, None, None, *lengths, 0.0, causal, scale=scale,
        )  # fmt: skip
    elif backend == "efficient":
        made = build(
            aten._scaled_dot_product_efficient_attention_backward.default,
            grad, *inputs, bias, *saved, 0.0, [True, True, True, of_bias], causal, scale=scale,
        )  # fmt: skip
    elif backend == "flash2":
        out, log_sum, seed, offset = saved
        made = build(
            aten._scaled_dot_product_flash_attention_backward.default,
            grad, *inputs, out, log_sum, None, None, *lengths, 0.0, causal, seed, offset, scale=scale,
        )  # fmt: skip
    else:
        made = build(ours.flash4_attention_backward.default, grad, *inputs, *saved, scale, causal, deterministic)
    return build.parts(made, *range(4 if of_bias else 3))


def _widths(case: Case) -> str:
    return f"{case.width}" if case.width == case.value_width else f"{case.width} and {case.value_width}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
