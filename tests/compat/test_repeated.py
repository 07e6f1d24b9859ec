"""Calls that a trace has made before: the same graph as torch's own way."""

import pytest
import torch
from torch import nn

from stepgraph.capture import trace_step
from stepgraph.compat import repeated
from stepgraph.compat.repeated import _Call
from stepgraph.run.saved.graphs import digest


class Block(nn.Module):
    """Views, splits, writes, casts, dropout, complex numbers, infinities, constants and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.wide(self.norm(x)).chunk(3, dim=-1)
        turned = torch.view_as_real(torch.view_as_complex(query.reshape(2, 4, 4, 2)) * 1j).flatten(2)
        mask = torch.full((4, 4), float("-inf")).triu(1)
        scores = turned @ key.transpose(1, 2) + mask + torch.tensor([1.0, 2.0, 3.0, 4.0])
        value = torch.cat([torch.tensor([]), value], dim=-2)  # as a cache of keys and values at its first use
        mixed = nn.functional.dropout(scores.float().softmax(-1), 0.1) @ value
        mixed = torch.where(mixed > 0, mixed, mixed.bfloat16().to(x.dtype)).clone()
        mixed[:, 0] = 0.0
        mixed.mul_(2).t_() if mixed.ndim == 2 else mixed.mul_(2)
        self.seen += mixed.detach().mean((0, 1))
        return x + self.back(nn.functional.gelu(mixed)) + mixed.as_strided((2, 4, 8), (32, 8, 1))


def written() -> str:
    """A step of two blocks, with the form and storage of every value."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    traced = trace_step(model, lambda m, x: m(x).square().mean(), torch.zeros(2, 4, 8), optimizer, max_grad_norm=1.0)
    return digest(traced.program)


def test_the_graph_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made, tensors_of, found = [], _Call.tensors_of, []
    monkeypatch.setattr(_Call, "tensors_of", lambda call, form: made.append(call.func) or tensors_of(call, form))
    for follows in (repeated._follows_forms, lambda _: False):  # then torch does all
        monkeypatch.setattr(repeated, "_follows_forms", follows)
        monkeypatch.setattr(repeated, "_OUTCOMES", {})
        found.append(written())
    assert found[0] == found[1]
    assert len(made) > 80 and len(set(made)) > 15


def test_another_trace_makes_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks torch for no call that torch gave a repeatable outcome for."""
    outcomes: dict = {}
    monkeypatch.setattr(repeated, "_OUTCOMES", outcomes)
    first, known = written(), dict(outcomes)
    asked, outcome = [], _Call.outcome
    monkeypatch.setattr(_Call, "outcome", lambda call, *given: asked.append(call.key) or outcome(call, *given))
    assert written() == first and outcomes == known and not asked
    monkeypatch.setattr(repeated, "_LARGE", 10)
    assert written() == first and asked  # it started again


def test_autocast_is_seen_where_it_was_off_before() -> None:
    def loss(model: nn.Bilinear, x: torch.Tensor) -> torch.Tensor:
        plain = model(x, x)
        with torch.autocast("cpu", torch.bfloat16):
            return plain.sum() + model(x, x).sum()

    graph = trace_step(nn.Bilinear(4, 4, 4), loss, torch.zeros(2, 4)).step.graph
    forward = [n for n in graph.nodes if "trilinear" in str(n.target) and n.meta["stepgraph"].phase == "forward"]
    assert [n.target.namespace for n in forward] == ["aten", "stepgraph_autocast"]


@pytest.mark.parametrize("changed", ["dtype", "strides", "number"])
def test_another_form_is_another_call(changed: str) -> None:
    def loss(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = x / 2
        second = {"dtype": x.double(), "strides": x.t()}.get(changed, x) / (3.5 if changed == "number" else 2)
        assert second.dtype == (torch.float64 if changed == "dtype" else x.dtype)
        assert second.stride() == ((1, 4) if changed == "strides" else first.stride())
        return first.sum() + second.sum()

    graph = trace_step(nn.Linear(1, 1), loss, torch.zeros(4, 4, requires_grad=True)).step.graph
    divisors = [n.args[1] for n in graph.nodes if n.target is torch.ops.aten.div.Tensor]
    assert divisors[:2] == ([2, 3.5] if changed == "number" else [2, 2])


@pytest.mark.parametrize("backend", ["mkldnn", "cudnn"])
def test_a_setting_that_chooses_kernels_is_part_of_the_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: dict = {}
    monkeypatch.setattr(repeated, "_OUTCOMES", outcomes)

    def loss(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x / 2).sum()

    def traced() -> None:
        trace_step(nn.Linear(1, 1), loss, torch.zeros(4, 4, requires_grad=True))

    traced()
    with getattr(torch.backends, backend).flags(enabled=False):
        traced()
    divisions = [key for key in outcomes if key[0] is torch.ops.aten.div.Tensor and key[-1] == 2]
    assert len({key[1] for key in divisions}) == 2


def test_the_default_dtype_is_part_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x.int() / 2).sum() + model(x).sum()

    monkeypatch.setattr(repeated, "_OUTCOMES", {})
    model, x, found = nn.Linear(4, 1), torch.zeros(4, 4), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            graph = trace_step(model, loss, x).step.graph
        finally:
            torch.set_default_dtype(torch.float32)
        found += [n.meta["val"].dtype for n in graph.nodes if n.target is torch.ops.aten.div.Tensor]
    assert found == [torch.float32, torch.float64]
