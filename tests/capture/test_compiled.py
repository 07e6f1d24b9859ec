"""What ``torch.compile`` made is captured as what is inside; ``accelerate``'s optimizer as the one inside."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph


def network():
    return nn.Sequential(
        nn.Linear(6, 10), nn.Sequential(nn.LayerNorm(10), nn.Dropout(0.2)), nn.Tanh(), nn.Linear(10, 6)
    )


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def batches():
    return [{"x": torch.randn(4, 6), "y": torch.randn(4, 6)} for _ in range(2)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def whole(model):
    return torch.compile(model), mse


def whole_in_place(model):
    model.compile()
    return model, mse


def child(model):
    model[1] = torch.compile(model[1], fullgraph=True)
    return model, mse


def child_in_place(model):
    model[1][0].compile()
    return model, mse


def child_of_child_twice(model):
    model[1][0] = torch.compile(model[1][0])
    return torch.compile(model), mse


def loss(model):
    return model, torch.compile(mse)


def function_in_loss(model):
    compiled = torch.compile(F.mse_loss, dynamic=True)
    return model, lambda model, batch: compiled(model(batch["x"]), batch["y"])


def forward(model):
    model[1].forward = torch.compile(model[1].forward)
    return model, mse


KINDS = [whole, whole_in_place, child, child_in_place, child_of_child_twice, loss, function_in_loss, forward]


def run(model, loss_fn, given):
    torch.manual_seed(0)
    step = stepgraph.capture(model, loss_fn, given[0], adamw(model), max_grad_norm=0.5, passes="exact")
    torch.manual_seed(1)
    return step, [step(batch) for batch in given * 2]


@pytest.mark.parametrize("wrap", KINDS)
def test_compiled_parts_are_captured_as_they_were(wrap):
    """Compared with the capture of the plain model, which other tests compare with eager."""
    given = batches()
    torch.manual_seed(0)
    plain = network()
    torch.manual_seed(0)
    compiled, loss_fn = wrap(network())
    expected, expected_losses = run(plain, mse, given)
    step, losses = run(compiled, loss_fn, given)
    assert torch.equal(torch.stack(losses), torch.stack(expected_losses))
    assert all(map(torch.equal, compiled.parameters(), plain.parameters()))
    assert [s.what.name for s in step.graph.inputs] == [s.what.name for s in expected.graph.inputs]
    paths = {node.meta["stepgraph"].path for node in step.graph.nodes("forward", "loss", "backward")}
    assert paths == {node.meta["stepgraph"].path for node in expected.graph.nodes("forward", "loss", "backward")}


def test_a_compiled_model_still_compiles_after_the_capture():
    model = torch.compile(network(), backend="eager")
    batch = batches()[0]
    stepgraph.capture(model, mse, batch, passes="exact")
    seen = []
    counted = torch.compile(network(), backend=lambda graph, _: seen.append(graph) or graph.forward)
    counted(batch["x"])
    assert seen


def test_dynamo_still_compiles_behind_a_graph_break_after_the_capture():
    """Not so in torch 2.11 after a trace through what was compiled with ``fullgraph=True``."""
    model, loss_fn = child(network())
    stepgraph.capture(model, loss_fn, batches()[0], passes="exact")
    seen = []

    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(broken, backend=lambda graph, _: seen.append(graph) or graph.forward)(torch.ones(3))
    assert len(seen) == 2


def test_the_optimizer_that_accelerate_prepared(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # what other tests of this process set
    given = batches()
    torch.manual_seed(0)
    plain = network()
    torch.manual_seed(0)
    model = network()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    model, prepared = accelerator.prepare(model, optimizer)
    step = stepgraph.capture(model, mse, given[0], prepared, passes="exact")
    reference = adamw(plain)
    for batch in given * 2:
        torch.manual_seed(5)
        loss = step(batch)
        torch.manual_seed(5)
        expected = mse(plain, batch)
        expected.backward()
        reference.step()
        reference.zero_grad()
        assert torch.equal(loss, expected.detach())
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert step.spec.optimizer is optimizer
    with monkeypatch.context() as patch:  # in accelerate's loop an update would come after two batches
        patch.setitem(prepared.gradient_state.plugin_kwargs, "num_steps", 2)
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2\).*pass accumulate=2"):
            stepgraph.capture(model, mse, given[0], prepared)
        stepgraph.capture(model, mse, given[0], prepared, accumulate=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(prepared, 0.9)
    stepgraph.capture(model, mse, given[0], prepared)(given[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a schedule's step before the optimizer's
        schedule.step()
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "step", lambda: None)
        with pytest.raises(ValueError, match="step was replaced on the optimizer that accelerate prepared"):
            stepgraph.capture(model, mse, given[0], prepared)
    monkeypatch.setattr(prepared, "scaler", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="stepped by a GradScaler"):
        stepgraph.capture(model, mse, given[0], prepared)
