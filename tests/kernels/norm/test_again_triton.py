"""A call made again launches what `single` launches, on tensors of the same forms. No GPU: launches are recorded."""

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.kernels.norm.spec import Norm
from stepgraph.kernels.norm.triton import again, launch, plans, single
from stepgraph.kernels.norm.triton.config.limits import Hardware

BF16 = torch.bfloat16


@pytest.fixture
def launches(monkeypatch):
    """What would be launched, in order: kernel, numbers, constants, grid, stream and forms of the tensors."""
    seen = []

    def first(self, stream, *tensors):
        seen.append((self.kernel, self.numbers, self.constants, self.grid, self.options, stream, forms(tensors)))

    def zeros(device, stream, words):
        return torch.empty(words, dtype=torch.int64, device="meta")

    monkeypatch.setattr(launch.Launch, "_first", first)
    monkeypatch.setattr(plans, "hardware_of", lambda x: Hardware(132, 227 * 1024))
    monkeypatch.setattr(plans, "_empty", lambda *form: torch.empty_strided(*form[:2], dtype=form[2], device="meta"))
    monkeypatch.setattr(single, "PLANS", plans.Plans())
    monkeypatch.setattr(single, "current_stream", lambda device: 7)
    monkeypatch.setattr(again, "raw_stream", lambda index: 7)
    for module in (single, again):
        monkeypatch.setattr(module, "current_device", lambda: None)
        monkeypatch.setattr(module, "zeros", zeros)
    return seen


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def forms(tensors):
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]


@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(16, 256), (50000, 1024), (7, 65536), (3, 333)])
def test_launches_and_results_are_those_of_single(launches, shape, kind, needs):
    norm = Norm(kind, 1e-5, 0.0, BF16)
    x, weight, dy = meta(*shape), meta(shape[-1], dtype=torch.float32), meta(*shape)
    bias = meta(shape[-1], dtype=torch.float32) if kind == "layer" else None
    if bias is None:
        needs = (needs[0], needs[1] or needs[2], False)
    y, _, mean, rstd, _ = single.forward(norm, x, weight, bias, None, True)
    forward = again.forward(norm, x, weight, bias)
    assert forms(forward(x, weight, bias)) == forms((y, mean, rstd))
    count = len(launches) // 2
    assert launches and launches[:count] == launches[count:]
    del launches[:]
    wanted = single.backward(norm, dy, x, weight, mean, rstd, None, BF16, *needs)
    backward = again.backward(norm, dy, x, weight, mean, rstd, needs)
    assert forms(backward(dy, x, weight, mean, rstd)) == forms(wanted)
    half = len(launches) // 2
    assert half and launches[:half] == launches[half:]


def test_copies_are_made_by_single(launches):
    norm = Norm("rms", 1e-5, 0.0, BF16)
    weight = meta(16)[::2]
    assert single.forward_plan(norm, meta(4, 8), weight, None, None, True).copies
    assert again.forward(norm, meta(4, 8), weight, None) is None
    with pytest.raises(ValueError, match="weight has shape"):
        again.forward(norm, meta(4, 8), meta(7), None)


def test_another_device_than_the_current(launches, monkeypatch):
    """`single` switches to the device of the tensors; a call made again leaves that to it."""
    calls = []
    norm = Norm("rms", 1e-5, 0.0, BF16)
    x, weight = meta(16, 256), meta(256)
    forward = again.forward(norm, x, weight, None)
    y, mean, rstd = forward(x, weight, None)
    backward = again.backward(norm, y, x, weight, mean, rstd, (True, True, False))
    del launches[:]
    monkeypatch.setattr(again, "current_device", lambda: 1)
    monkeypatch.setattr(single, "forward", lambda *a: calls.append("forward") or ("y", None, None, "rstd", None))
    monkeypatch.setattr(single, "backward", lambda *a: calls.append("backward") or ("dx", "dw", None))
    assert forward(x, weight, None) == ("y", None, "rstd")
    assert backward(y, x, weight, mean, rstd) == ("dx", "dw", None)
    assert calls == ["forward", "backward"] and not launches
