"""Models whose weights bitsandbytes holds: captured as they are, and dequantized by our kernel."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.options import StepOptions

bnb = pytest.importorskip("bitsandbytes.nn")


def captured(passes, nested=True, kind="nf4"):
    torch.manual_seed(0)
    options = dict(compute_dtype=torch.float32, compress_statistics=nested, quant_type=kind)
    layers = [bnb.Linear4bit(64, 64, **options), nn.Linear(64, 64), bnb.Linear4bit(64, 64, bias=False, **options)]
    model = nn.Sequential(*layers).to("cpu")
    model[0].bias.requires_grad_(False)
    batch = torch.randn(2, 8, 64)
    optimizer = torch.optim.AdamW(model[1].parameters(), fused=True)
    step = stepgraph.capture(model, lambda m, x: m(x).square().mean(), batch, optimizer, passes=passes)
    return step, batch


def operators(step):
    return {str(node.target).removesuffix(".default") for node in step.graph.graph.nodes}


@pytest.mark.parametrize("nested", [True, False])
def test_our_kernel_takes_over(nested):
    exact, batch = captured("exact", nested)
    assert "bitsandbytes.gemm_4bit" in operators(exact)
    assert "bitwise equal" in str(exact.verify(batch))
    ours, _ = captured(StepOptions(inductor="off"), nested)
    (report,) = (r for r in ours.report if r.name == "bitsandbytes_4bit")
    assert (report.matched, report.changed) == (3, 3)
    assert not any(name.startswith("bitsandbytes.") for name in operators(ours))
    for _ in range(2):
        assert torch.equal(ours(batch), exact(batch))


def test_other_formats_stay():
    step, _ = captured(StepOptions(inductor="off"), kind="fp4")
    (report,) = (r for r in step.report if r.name == "bitsandbytes_4bit")
    assert (report.matched, report.changed) == (3, 0)
    assert report.notes == ["left to bitsandbytes: weights of fp4 in torch.uint8"]


def test_what_layers_change_in_their_first_call_is_refused_with_a_fix():
    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    def models(dtype):
        layer = bnb.Linear4bit(64, 64, compute_dtype=dtype, quant_type="nf4")
        layer.bias.requires_grad_(False)
        return nn.Sequential(nn.Linear(64, 64), layer).to("cpu")

    x, model = torch.randn(4, 64), models(torch.bfloat16)
    with pytest.raises(stepgraph.CaptureError, match=r"1\.bias\.data.*call the model once before"):
        stepgraph.capture(model, loss_fn, x, passes="exact")
    loss_fn(model, x)
    assert stepgraph.capture(model, loss_fn, x, passes="exact").verify(x).bitwise
    model = models(torch.float32)
    loss_fn(model, x)
    with pytest.raises(stepgraph.CaptureError, match=r"set bnb_4bit_compute_dtype=torch\.bfloat16"):
        stepgraph.capture(model, loss_fn, x, passes="exact")(x)
