"""The backward of norms that sequences scale, shift and gate on a GPU: its numbers, and a step that uses it."""

from dataclasses import replace

import pytest
import torch

import stepgraph
from stepgraph.bench.model import models
from stepgraph.bench.model.child import fused_adamw, loss_of, trained
from stepgraph.kernels.norm.modulated import gated_norm_backward, modulated_norm_backward
from tests.kernels.norm.test_modulated import inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPES = [(64, 256, 1024), (3, 77, 1152), (1, 4096, 3072), (200, 16, 384), (2, 40, 4096)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("B, T, N", SHAPES)
def test_kernels_have_autograds_gradients(B, T, N, gated, dtype):
    given, expected = inputs(B, T, N, gated=gated, dtype=dtype)
    on_gpu = [t.cuda() if isinstance(t, torch.Tensor) else t for t in given]
    run = gated_norm_backward if gated else modulated_norm_backward
    results = run(*on_gpu)
    again = run(*on_gpu)
    for found, once_more, wanted in zip(results, again, expected, strict=True):
        assert torch.equal(found, once_more)
        scale = wanted.abs().max().item()
        rounding = 2**-7 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=4 * rounding, atol=rounding * scale)


def test_a_step_of_a_diffusion_transformer(monkeypatch):
    """Compiled, in one CUDA graph; its losses with and without the pass."""
    whole = models.MODELS["dit-l-2"]
    sizes = whole.sizes | {"layers": 5, "hidden": 512, "heads": 8}
    monkeypatch.setitem(models.MODELS, "dit-small", replace(whole, batch_size=16, sizes=sizes))

    def losses(*disabled):
        model = models.build("dit-small", torch.device("cuda"))
        batch = models.batch_of("dit-small", torch.device("cuda"))
        options = stepgraph.StepOptions(disable_pass=disabled)
        step = stepgraph.capture(model, loss_of, batch, fused_adamw(trained(model)), max_grad_norm=1.0, passes=options)
        return torch.stack([step(batch).clone() for _ in range(5)]), {r.name: r for r in step.report}

    found, reports = losses()
    assert reports["contiguous_rows"].summary.startswith("11 of 11")
    assert reports["modulated_norm"].summary == "11 of 11 norms scaled and shifted by sequence, 10 with a gate"
    assert reports["cuda_graph"].summary.startswith("1 CUDA graph, 0 nodes on the host")
    expected, _ = losses("modulated_norm", "contiguous_rows")
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)
