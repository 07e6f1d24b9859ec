"""Tensors of any layout, configurations, and float64 references, for the checks of this folder."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from stepgraph.kernels.norm.triton.config.limits import Config
from tests.kernels.triton_tools import interpret_masks

EPS = 1e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "slice of columns", "slice of heads", "permuted", "expanded", "unaligned")

interpret_masks()


def tensor(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> torch.Tensor:
    """Normally distributed values of ``shape`` in memory laid out as ``layout`` says; last stride 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    if layout == "slice of columns":
        return normal(*shape[:-1], shape[-1] + 5)[..., 3 : 3 + shape[-1]]
    if layout == "slice of heads" and len(shape) > 2:
        return normal(*shape[:-2], 3 * shape[-2], shape[-1])[..., shape[-2] : 2 * shape[-2], :]
    if layout == "permuted" and len(shape) > 2:
        return normal(*reversed(shape[:-1]), shape[-1]).permute(*reversed(range(len(shape) - 1)), len(shape) - 1)
    if layout == "expanded" and len(shape) > 1:
        return normal(*shape[1:]).expand(shape)
    if layout == "unaligned":
        count = torch.Size(shape).numel()
        return normal(count + 1)[1:].view(shape)
    return normal(*shape)


def norm(kind: str, h: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, offset: float) -> torch.Tensor:
    """y, by torch's own norms, in the dtype of ``h``."""
    n = h.shape[-1:]
    y = F.rms_norm(h, n, None, EPS) if kind == "rms" else F.layer_norm(h, n, None, None, EPS)
    y = y if w is None else y * (w + offset)
    return y if b is None else y + b


def close(name: str, actual: torch.Tensor, expected: torch.Tensor, terms: int) -> None:
    """Assert that ``actual`` is the float64 ``expected`` rounded to its dtype, and summed in float32.

    The interpreter rounds bfloat16 toward zero, as hardware does not: a whole unit in the last place, ``eps``.
    Sums of ``terms`` float32 terms of order one err by sqrt(terms) * eps32 or so; 32 leaves room for the worst of many
    runs.
    """
    eps, eps32 = torch.finfo(actual.dtype).eps, torch.finfo(torch.float32).eps
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        actual.double(), expected, rtol=eps, atol=(eps * 2**-6 + 32 * eps32 * terms**0.5) * scale,
        msg=lambda text: f"{name}: {text}",
    )  # fmt: skip


def configs(backward: bool, split: bool, weights: tuple[str, ...] = ("before",)) -> st.SearchStrategy[Config]:
    """Any way to cover small rows: far from what `select` would pick, close to every corner."""
    made = st.builds(
        Config,
        rows=st.sampled_from((1, 2, 4, 8, 16)),
        block=st.sampled_from((16, 32)),
        warps=st.sampled_from((1, 4)),
        stages=st.just(1),
        programs=st.sampled_from((1, 2, 5) if backward else (0, 1, 3)),
        split=st.sampled_from((1, 2, 3)) if split else st.just(1),
        weight=st.sampled_from(weights),
        exchange=st.sampled_from(("wait", "launch")) if split and not backward else st.just("wait"),
    )
    # Only a weight that is there before all rows can serve more than one step of a program that has rows to itself.
    return made.map(lambda c: replace(c, programs=0) if c.weight != "before" and c.split == 1 else c)
