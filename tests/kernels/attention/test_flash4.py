"""FlashAttention 4's operators: the reference against torch's attention in fp64, layouts, and what is refused."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.attention import flash4, flash4_attention, flash4_attention_backward


def tensors(B, H, H_kv, T, S, D, D_v, dtype=torch.float64, order=(0, 1, 2, 3)):
    """q, k, v and the gradient of the result, with their dimensions in memory in this order."""
    back = sorted(range(4), key=order.__getitem__)
    shapes = ((B, H, T, D), (B, H_kv, S, D), (B, H_kv, S, D_v), (B, H, T, D_v))
    return [torch.randn([shape[d] for d in order], dtype=torch.float64).permute(back).to(dtype) for shape in shapes]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_reference_is_torchs_attention(data):
    B, H_kv, shared, T, S, D, D_v = (data.draw(st.integers(1, 4)) for _ in range(7))
    causal = data.draw(st.booleans())
    S = T if causal else S
    order = data.draw(st.permutations((0, 1, 2)))
    scale = data.draw(st.sampled_from([None, 0.3]))
    q, k, v, dy = tensors(B, H_kv * shared, H_kv, T, S, D, D_v, order=(*order, 3))
    out, lse = flash4_attention(q, k, v, scale, causal)
    grads = flash4_attention_backward(dy, q, k, v, out, lse, scale, causal, False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    right = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, right)
    for mine, theirs in zip(grads, torch.autograd.grad(right, leaves, dy), strict=True):
        torch.testing.assert_close(mine, theirs)
    scores = q @ k.repeat_interleave(shared, 1).mT * (D**-0.5 if scale is None else scale)
    hidden = torch.full((T, S), -torch.inf, dtype=torch.float64).triu(1) if causal else 0.0
    torch.testing.assert_close(lse, (scores + hidden).logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3)])
@pytest.mark.parametrize("widths", [(8, 8), (16, 8)])
def test_fakes_say_what_is_given(dtype, order, widths):
    q, k, v, dy = tensors(2, 4, 2, 5, 5, *widths, dtype=dtype, order=order)
    check = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(torch.ops.stepgraph.flash4_attention.default, (q, k, v, None, True), **check)
    out, lse = flash4_attention(q, k, v, None, True)
    # The order of the query's dimensions in memory, as cuDNN has it: who reads one can read the other.
    assert sorted(range(4), key=lambda d: -out.stride(d)) == sorted(range(4), key=lambda d: -q.stride(d))
    given = (dy, q, k, v, out, lse, None, True, False)
    torch.library.opcheck(torch.ops.stepgraph.flash4_attention_backward.default, given, **check)
    for grad, x in zip(flash4_attention_backward(*given), (q, k, v), strict=True):
        assert (grad.shape, grad.stride(), grad.dtype) == (x.shape, x.stride(), x.dtype)


def test_the_package_is_found_by_its_folder(monkeypatch, tmp_path):
    """FlashAttention 2 is a package of the same name; a package that does not load says so in one line."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    flash4.unavailable.cache_clear()
    try:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn/__init__.py").touch()
        assert not flash4.installed() and flash4.unavailable() == "flash-attn-4 is not installed"
        (tmp_path / "flash_attn/cute").mkdir()
        (tmp_path / "flash_attn/cute/interface.py").write_text("import a_library_that_is_not_there\n")
        flash4.unavailable.cache_clear()
        assert flash4.installed() and "cannot be imported: No module named" in flash4.unavailable()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
            del sys.modules[name]
        flash4.unavailable.cache_clear()


def test_what_the_package_is_called_with(monkeypatch):
    """Its own layout (B, T, H, D), with memory for its results; under names that its versions have."""
    calls = {}
    package = types.SimpleNamespace(
        _flash_attn_fwd=lambda *args, **options: calls.update(forward=(args, options)),
        _flash_attn_bwd=lambda *args, **options: calls.update(backward=(args, options)),
    )
    monkeypatch.setattr(flash4.PACKAGE, "load", lambda: package)
    q, k, v, dy = tensors(2, 4, 2, 5, 5, 8, 8, dtype=torch.bfloat16)
    out, lse = flash4.run_forward(q, k, v, 0.5, True)
    args, options = calls["forward"]
    assert [x.shape for x in args] == [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]
    assert options.pop("out").data_ptr() == out.data_ptr() and options.pop("lse").data_ptr() == lse.data_ptr()
    assert options == {"softmax_scale": 0.5, "causal": True, "return_lse": True}
    grads = flash4.run_backward(dy, q, k, v, out, lse, 0.5, True, True)
    args, options = calls["backward"]
    assert [x.data_ptr() for x in args] == [x.data_ptr() for x in (q, k, v, out, dy, lse)]
    assert [options.pop(name).data_ptr() for name in ("dq", "dk", "dv")] == [grad.data_ptr() for grad in grads]
    assert options == {"softmax_scale": 0.5, "causal": True, "deterministic": True}
