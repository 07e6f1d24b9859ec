"""Updates written out as arithmetic, and what the pass says of those that it leaves."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import stepgraph
from stepgraph.capture import gradients, trace_step
from stepgraph.costs.memory import estimate_memory
from stepgraph.graph import edit
from stepgraph.passes import get, run_passes

EXPAND = replace(
    get("expand_optimizer", small=0), needs_cuda=False
)  # on a GPU it pays; its arithmetic is the same here
aten = torch.ops.aten


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_fused_adam_written_out(kind, weight_decay):
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    eager = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    model = copy.deepcopy(eager)
    ours, theirs = (
        kind(m.parameters(), lr=0.01, weight_decay=weight_decay, maximize=True, fused=True) for m in (model, eager)
    )
    step = stepgraph.capture(model, mse, batch, ours, passes=["inplace_update", EXPAND])
    assert step.report[-1].changed == 4 and not step.report[-1].notes
    assert not any("_fused_" in str(node.target) for node in step.graph.nodes())
    for _ in range(5):
        step(batch)
        mse(eager, batch).backward()
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("master", [False, True])
def test_an_update_left_out_changes_nothing(master):
    """What the fused kernel and the rounding of masters would leave alone, arithmetic leaves alone."""
    dtype = torch.bfloat16 if master else torch.float32
    batch = {"x": torch.randn(4, 6, dtype=dtype), "y": torch.randn(4, 6, dtype=dtype)}
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).to(dtype)
    kind = stepgraph.MasterAdamW if master else functools.partial(torch.optim.AdamW, fused=True)
    optimizer = kind(model.parameters(), lr=0.01)
    other = copy.deepcopy(model)
    plain = stepgraph.capture(
        other, mse, batch, kind(other.parameters(), lr=0.01), max_grad_norm=1.0, passes=["inplace_update", EXPAND]
    )
    step = stepgraph.capture(
        model, mse, batch, optimizer, max_grad_norm=1.0, on_nonfinite="skip", passes=["inplace_update", EXPAND]
    )
    assert step.report[-1].changed == 4
    assert not any("_fused_" in str(n.target) or "_foreach_copy_" in str(n.target) for n in step.graph.nodes())
    for _ in range(3):
        state = [*model.parameters(), *(t for entry in optimizer.state.values() for t in entry.values())]
        before = [t.detach().clone() for t in state]
        step(batch | {"y": batch["y"] * float("nan")})
        assert all(map(torch.equal, before, state))
        assert torch.equal(step(batch), plain(batch))
        assert not any(map(torch.equal, before, state))
        assert all(map(torch.equal, model.parameters(), other.parameters()))


class Wide(nn.Module):
    """Ten small parameters and two that are not, as ``small=100`` has it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 40), nn.Linear(40, 6)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(4))

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("kind", ["plain", "masters", "skip", "masters, skip"])
def test_small_parameters_stay_together(kind, monkeypatch):
    """In the fused operator, whose bits they have, and clipped; the others as without them."""

    def together(grads, params, limit, stages=None):  # as on a GPU
        norm = gradients._total_norm(grads, params, False, stages)
        scale = torch.clamp((norm + 1e-6).reciprocal() * limit, max=1.0)
        return dict(zip(grads, aten._foreach_mul.Tensor(list(grads.values()), scale), strict=True)), norm

    monkeypatch.setattr(gradients, "clip", together)
    dtype = torch.bfloat16 if "masters" in kind else torch.float32
    optimizer = stepgraph.MasterAdamW if "masters" in kind else functools.partial(torch.optim.AdamW, fused=True)
    batch = {"x": torch.randn(4, 6, dtype=dtype), "y": torch.randn(4, 6, dtype=dtype)}
    first = Wide().to(dtype)

    def run(*passes, steps=4):
        model = copy.deepcopy(first)
        step = stepgraph.capture(
            model, mse, batch, optimizer(model.parameters(), lr=0.01), max_grad_norm=0.1,
            on_nonfinite="skip" if "skip" in kind else "update", passes=["inplace_update", *passes],
        )  # fmt: skip
        for i in range(steps):
            if i == 2 and "skip" in kind:
                step(batch | {"y": batch["y"] * float("nan")})
            step(batch)
        return dict(model.named_parameters()), step

    expected, _ = run(steps=1)
    found, _ = run(EXPAND.with_options(small=100), steps=1)
    assert all(torch.equal(found[name], w) and not torch.equal(w, dict(first.named_parameters())[name])
               for name, w in expected.items() if w.numel() <= 100)  # fmt: skip
    expected, _ = run()
    found, step = run(EXPAND.with_options(small=100))
    report = step.report[-1]
    assert report.changed == 2 and report.summary.endswith("10 small ones updated together by the fused kernel")
    (update,) = (node for node in step.graph.nodes() if "_fused_" in str(node.target))
    clips = [n for n in step.graph.nodes("optimizer") if n.target is aten._foreach_mul_.Tensor]
    assert [len(n.args[0]) for n in clips] == [10]  # arithmetic clips the others
    assert len(update.args[0]) == len(update.args[5]) == 10 and update.args[4] == []
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-2)
    _, step = run(EXPAND.with_options(small=100, several=11))
    assert step.report[-1].changed == 12 and not any("_fused_" in str(n.target) for n in step.graph.nodes())
    none, step = run(EXPAND.with_options(small=1000))
    assert step.report[-1].changed == 0 and all(torch.equal(none[name], expected[name]) for name in expected)


def work(layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(operators evaluated on fake tensors, arguments put into lists) for layers of one form, clipped."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    step = trace_step(model, mse, batch, optimizer, max_grad_norm=1.0).step
    run_passes(step, ["inplace_update"])
    evaluated = put = 0
    form_of_made, update_arg = edit._form_of_made, fx.Node.update_arg

    def evaluate(*given):
        nonlocal evaluated
        evaluated += 1
        return form_of_made(*given)

    def update(node, i, value):
        nonlocal put
        put += len(value) if isinstance(value, (list, tuple)) else 1
        update_arg(node, i, value)

    with monkeypatch.context() as patch:
        patch.setattr(edit, "_form_of_made", evaluate)
        patch.setattr(fx.Node, "update_arg", update)
        (report,) = (r for r in run_passes(step, [EXPAND]) if r.name == "expand_optimizer")
    assert report.changed == 2 * layers
    return evaluated, put


def test_work_is_linear_in_parameters(monkeypatch):
    """Updates that are alike are evaluated once, and what clips the gradients is not read again for each of them."""
    few, put = work(8, monkeypatch)
    many, more = work(16, monkeypatch)
    assert few == many > 0
    assert put <= 16 and more <= 32


def test_every_tensor_of_an_update_is_its_own():
    """Equal calls are evaluated once, but no two nodes share a recorded tensor, but for what is written in place."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = trace_step(model, mse, {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}, optimizer).step
    run_passes(step, ["inplace_update", EXPAND])
    made = [n.meta["val"] for n in step.nodes("optimizer") if n.target in (aten.mul.Tensor, aten.div.Tensor)]
    assert len({id(value) for value in made}) == len({value.untyped_storage()._cdata for value in made}) == len(made)
    for node in step.nodes("optimizer"):
        if node.target is aten.copy_.default:
            assert node.meta["val"] is node.args[0].meta["val"]


def test_small_parameters_are_counted_over_all_updates():
    """So that an update in parts, as of state on the host, has the bits of one."""
    model = Wide()
    vectors, matrices = ([p for p in model.parameters() if p.dim() == n] for n in (1, 2))
    groups = [{"params": vectors[:5]}, {"params": vectors[5:], "weight_decay": 0.0}, {"params": matrices}]
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    optimizer = torch.optim.AdamW(groups, fused=True)
    step = stepgraph.capture(model, mse, batch, optimizer, passes=["inplace_update", EXPAND.with_options(small=100)])
    assert step.report[-1].summary.endswith("10 small ones updated together by the fused kernel")
    updates = [n for n in step.graph.nodes() if "_fused_" in str(n.target)]
    assert [len(n.args[0]) for n in updates] == [5, 5]


@pytest.mark.parametrize("master", [False, True])
def test_an_update_written_out_needs_no_memory(master):
    """`fit_memory` counts it: were its results counted, the update would be the peak that no choice lowers."""
    dtype = torch.bfloat16 if master else torch.float32
    batch = {"x": torch.randn(4, 512, dtype=dtype), "y": torch.randn(4, 512, dtype=dtype)}
    model = nn.Linear(512, 512, bias=False).to(dtype)
    kind = stepgraph.MasterAdamW if master else functools.partial(torch.optim.AdamW, fused=True)
    step = trace_step(model, mse, batch, kind(model.parameters(), lr=0.01), max_grad_norm=1.0).program.main
    run_passes(step, [get("inplace_update"), EXPAND])
    weight = model.weight.nbytes
    found = estimate_memory(step.graph, fused=True)
    assert weight <= found.peak - found.inputs < 1.2 * weight  # its gradient
