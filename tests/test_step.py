"""The callable: which changes it notices, captures again and gets right, and which do not concern it."""

import copy
import gc
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.lower import lowering
from stepgraph.run import forms


def mlp():
    return nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Tanh(), nn.Linear(10, 6))


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pair(n=4, dtype=torch.float32):
    return {"x": torch.randn(n, 6, dtype=dtype), "y": torch.randn(n, 6, dtype=dtype)}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def traces(monkeypatch):
    """How often a step was traced, as the length of a list."""
    calls, trace_step = [], lowering.trace_step
    monkeypatch.setattr(lowering, "trace_step", lambda *a, **k: calls.append(1) or trace_step(*a, **k))
    return calls


class Pair:
    """One model trained eagerly and a copy of it captured, side by side."""

    def __init__(self, model, batch, loss_fn=mse, lr=0.01, **options):
        self.loss_fn = loss_fn
        self.eager, self.model = model, copy.deepcopy(model)
        self.eager_optimizer = lr and torch.optim.AdamW(self.eager.parameters(), lr=lr)
        self.optimizer = lr and torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.step = stepgraph.capture(self.model, loss_fn, batch, self.optimizer or None, passes="exact", **options)

    def check(self, batch):
        """One step of each; losses, parameters and gradients must be equal."""
        torch.manual_seed(1)
        expected = self.loss_fn(self.eager, batch)
        expected.backward()
        if self.eager_optimizer:
            self.eager_optimizer.step()
            self.eager_optimizer.zero_grad()
        torch.manual_seed(1)
        loss = self.step(batch)
        assert not loss.requires_grad
        assert torch.equal(loss, expected)
        for a, b in zip(self.eager.parameters(), self.model.parameters(), strict=True):
            assert torch.equal(a, b)
            assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)

    def both(self, function):
        function(self.eager)
        function(self.model)


def test_other_shapes_are_captured_once_each(traces):
    both = Pair(mlp(), pair(4))
    graph = both.step.graph
    for n in (4, 3, 4, 3, 1, 4):
        both.check(pair(n))
    assert len(traces) == 3
    assert both.step.graph is graph


def test_other_dtype_strides_and_structure(traces):
    both = Pair(nn.Linear(6, 6), pair())
    transposed = {k: v.t().contiguous().t() for k, v in pair().items()}
    both.check(transposed)
    both.check({**pair(), "unread": None})
    both.check(pair())
    assert len(traces) == 3


def test_train_and_eval(traces):
    both = Pair(mlp(), pair())
    batch = pair()
    for mode in (True, False, True, False):
        both.both(lambda m, mode=mode: m.train(mode))
        both.check(batch)
    both.both(lambda m: m.train())
    both.both(lambda m: m[1].eval())  # one module only
    both.check(batch)
    assert len(traces) == 3


def test_the_number_of_captures_is_bounded(traces, monkeypatch):
    monkeypatch.setattr(forms, "MAX_CAPTURES", 2)
    both = Pair(nn.Linear(6, 6), pair(1))
    both.check(pair(2))
    both.check(pair(1))
    with pytest.warns(UserWarning, match="2 variants of the step are captured already") as told:
        both.check(pair(3))  # drops the form with two rows
    assert told[0].filename == __file__, "the caller's line is named"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both.check(pair(1))
    assert len(traces) == 3
    with pytest.warns(UserWarning):
        both.check(pair(2))
    assert len(traces) == 4


def test_many_captures_are_told_once_and_kept(traces, monkeypatch):
    monkeypatch.setattr(forms, "FEW_CAPTURES", 1)
    both = Pair(nn.Linear(6, 6), pair(1))
    with pytest.warns(UserWarning, match="1 variants of the step are captured already. Each costs a capture"):
        both.check(pair(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (3, 4, 1, 2, 3, 4):
            both.check(pair(rows))
    assert len(traces) == 4


def test_a_value_of_the_batch_that_is_another_one_in_each_form_is_named():
    x = torch.randn(2, 4)
    step = stepgraph.capture(nn.Linear(4, 4), lambda m, b: m(b["x"]).sum(), {"x": x, "of": {"id": 0}}, passes="exact")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(1, 5):
            step({"x": x, "of": {"id": i}})
    (message,) = [str(one.message) for one in told]
    assert message.startswith("batch['of']['id'] differs in each of 4 variants")


def test_plain_values_in_the_batch(traces):
    def loss_fn(model, batch):
        scale = batch["scale"] if batch["on"] else 1
        return mse(model, batch["data"][0]) * scale

    def batch(scale, on):
        return {"data": (pair(), "name"), "scale": scale, "on": on, "none": None}

    both = Pair(nn.Linear(6, 6), batch(2.0, True), loss_fn)
    for scale, on in ((2.0, True), (3.0, True), (2.0, False), (2.0, True)):
        both.check(batch(scale, on))
    assert len(traces) == 3


def test_a_whole_number_is_not_a_fraction():
    """2 == 2.0, and yet an integer tensor times the one is another dtype than times the other."""

    def loss_fn(model, batch):
        return model(batch["x"]).sum() * (torch.tensor(3) * batch["n"] / 7)

    both = Pair(nn.Linear(6, 6), {"x": torch.randn(4, 6), "n": 2}, loss_fn)
    both.check({"x": torch.randn(4, 6), "n": 2.0})
    both.check({"x": torch.randn(4, 6), "n": True})


def test_batch_that_is_one_tensor():
    both = Pair(nn.Linear(6, 6), torch.randn(4, 6), lambda m, x: m(x).square().mean())
    both.check(torch.randn(4, 6))


def test_model_moved_to_another_dtype(traces):
    both = Pair(nn.Linear(6, 6), pair(), lr=None)
    both.check(pair())
    both.both(lambda m: m.zero_grad())
    both.both(lambda m: m.double())
    both.check(pair(dtype=torch.float64))
    both.both(lambda m: m.to(torch.bfloat16))
    both.both(lambda m: m.zero_grad())
    both.check(pair(dtype=torch.bfloat16))
    assert len(traces) == 3


def test_parameter_data_replaced():
    both = Pair(nn.Linear(6, 6), pair())
    both.check(pair())
    new = torch.randn(6, 6)
    for model in (both.eager, both.model):
        model.weight.data = new.clone()
    both.check(pair())


def test_parameter_object_replaced():
    both = Pair(nn.Linear(6, 6), pair(), lr=None)
    both.check(pair())
    state = {k: torch.randn_like(v) for k, v in both.model.state_dict().items()}
    for model in (both.eager, both.model):
        model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    both.check(pair())


def test_parameter_object_replaced_under_an_optimizer():
    """The optimizer still holds the old parameter: eager would go on without training."""
    both = Pair(nn.Linear(6, 6), pair())
    both.model.weight = nn.Parameter(torch.randn(6, 6))
    with pytest.raises(stepgraph.CaptureError, match=r"build the optimizer from model\.parameters"):
        both.step(pair())


def test_values_loaded_in_place_need_no_capture(traces):
    both = Pair(nn.Linear(6, 6), pair())
    state = {k: torch.randn_like(v) for k, v in both.model.state_dict().items()}
    both.both(lambda m: m.load_state_dict(state))
    both.check(pair())
    assert len(traces) == 1


def test_buffer_replaced():
    both = Pair(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), pair())
    for model in (both.eager, both.model):
        model[1].running_mean = torch.full((6,), 3.0)
    both.check(pair())
    assert torch.equal(both.eager[1].running_mean, both.model[1].running_mean)


def test_parameter_frozen_and_thawed(traces):
    both = Pair(nn.Linear(6, 6), pair())
    for trained in (True, False, True):
        both.both(lambda m, trained=trained: m.weight.requires_grad_(trained))
        both.check(pair())


def test_optimizer_state_loaded():
    both = Pair(nn.Linear(6, 6), pair())
    saved = copy.deepcopy(both.eager_optimizer.state_dict()), copy.deepcopy(both.optimizer.state_dict())
    both.check(pair())
    late = copy.deepcopy(both.optimizer.state_dict())
    both.check(pair())
    for optimizer in (both.eager_optimizer, both.optimizer):
        optimizer.load_state_dict(copy.deepcopy(late))
    both.check(pair())
    assert saved[0]["state"] == {}


def test_optimizer_state_cleared():
    both = Pair(nn.Linear(6, 6), pair())
    both.check(pair())
    for optimizer in (both.eager_optimizer, both.optimizer):
        optimizer.state.clear()
    both.check(pair())


def test_autocast_around_the_call_is_refused(traces):
    """Eager would compute in bf16 there; the graph's casts are fixed."""
    both = Pair(nn.Linear(6, 6), pair())
    with torch.autocast("cpu", torch.bfloat16):
        for batch in (pair(), pair(3)):
            with pytest.raises(stepgraph.CaptureError, match="autocast is on around the call"):
                both.step(batch)
        with torch.autocast("cpu", enabled=False):
            both.check(pair())
    both.check(pair())
    assert len(traces) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_grad_mode_around_the_call_changes_nothing(mode):
    both = Pair(nn.Linear(6, 6), pair(), lr=None)
    batch = pair(3)
    with mode():
        loss = both.step(batch)
    expected = mse(both.eager, batch)
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(both.eager.weight.grad, both.model.weight.grad)
    assert not both.model.weight.grad.requires_grad


def test_inputs_are_left_alone():
    batch = pair()
    kept = {k: v.clone() for k, v in batch.items()}
    both = Pair(mlp(), batch)
    both.check(batch)
    assert all(torch.equal(batch[k], kept[k]) for k in kept)


def test_losses_are_kept_apart():
    both = Pair(nn.Linear(6, 6), pair(), max_grad_norm=1.0)
    batch = pair()
    first, norm = both.step(batch), both.step.metrics["grad_norm"]
    copies = first.clone(), norm.clone()
    both.step(batch)
    assert torch.equal(first, copies[0])
    assert torch.equal(norm, copies[1])


def test_eager_evaluation_between_steps():
    """The model stays an ordinary module with the trained values."""
    both = Pair(mlp(), pair())
    both.check(pair())
    both.both(lambda m: m.eval())
    batch = pair()
    assert torch.equal(mse(both.eager, batch), mse(both.model, batch))
    both.both(lambda m: m.train())
    both.check(pair())
    assert mse(both.model, batch).requires_grad


def test_report_and_graph():
    both = Pair(nn.Linear(6, 6), pair())
    assert [r.name for r in both.step.report] == [p.name for p in stepgraph.passes.exact()]
    assert both.step.graph.capture_s > 0
    assert both.step.graph.mesh is None


@pytest.mark.parametrize("kind", [Path, str])
def test_text_before_and_after_each_pass(kind, tmp_path):
    both = Pair(nn.Linear(6, 6), pair(), dump=kind(tmp_path / "graphs"))
    names = sorted(p.name for p in (tmp_path / "graphs").iterdir())
    assert names[0] == "00-captured.txt"
    assert len(names) == 1 + len(both.step.report)
    assert "return" in (tmp_path / "graphs" / names[-1]).read_text()


def test_no_graph_outlives_its_step():
    def live_nodes():
        gc.collect(), gc.collect()  # what is freed first frees the rest
        return sum(type(o) is torch.fx.Node for o in gc.get_objects())

    def run():
        both = Pair(mlp(), pair(), max_grad_norm=1.0)
        both.check(pair())

    run()
    before = live_nodes()
    for _ in range(5):
        run()
    assert live_nodes() <= before


def test_a_learning_rate_may_be_a_number_a_tensor_and_that_number_again():
    model, twin = (mlp().eval() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    batch = pair()
    mine, its = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin))
    step = stepgraph.capture(model, mse, batch, mine, passes="exact")
    for lr in (0.1, torch.tensor(0.0), 0.1, torch.tensor(0.05), 0.1):
        mine.param_groups[0]["lr"] = lr
        its.param_groups[0]["lr"] = float(lr)
        step(batch)
        mse(twin, batch).backward()
        its.step()
        its.zero_grad()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_the_example_batch_may_go():
    batch = pair()
    seen = [weakref.ref(tensor) for tensor in batch.values()]
    step = stepgraph.capture(mlp(), mse, batch, passes="exact")
    step(batch)
    del batch
    gc.collect(), gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert step(pair()).isfinite()


def test_a_step_and_its_report_can_be_printed():
    step = Pair(mlp(), pair()).step
    shown = repr(step).splitlines()
    assert shown[0].startswith("CapturedStep of Sequential") and "forward " in shown[1] and len(shown) == 3
    acted = sum(report.acted for report in step.report)
    assert f"{acted} of {len(step.report)} passes" in shown[2]
    assert str(step.report) == stepgraph.passes.format_report(list(step.report))
    assert step.spans is None  # there is no pipeline
    assert len(str(step.report).splitlines()) >= len(step.report)


def test_verify_after_a_capture_that_failed_reports_its_own_error(monkeypatch):
    """Also where no form of the step is left."""
    step = stepgraph.capture(nn.Linear(3, 1), lambda model, batch: model(batch["x"]).sum(), {"x": torch.ones(2, 3)})

    def fails(*_, **__):
        raise stepgraph.CaptureError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(lowering, "trace_step", fails)
        step._forms = forms.Forms()  # as after experts' rows exceed their room
        step._current = None
        for call in (step, step.verify):
            with pytest.raises(stepgraph.CaptureError, match="planted"):
                call({"x": torch.ones(2, 3)})
        with pytest.raises(RuntimeError, match="call the step again first"):
            step.report  # noqa: B018
        assert "dropped" in repr(step)
    assert step.verify({"x": torch.ones(2, 3)}).bitwise and step({"x": torch.ones(2, 3)}).isfinite()
