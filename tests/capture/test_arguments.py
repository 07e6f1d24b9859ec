"""Arguments in the wrong place, and modules and losses that a trace cannot take: one line each, nothing changed."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph import CaptureError


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def loss_fn(model, x):
    return model(x).square().mean()


X = torch.randn(4, 4)


def message_of(*arguments, **options):
    held = list(arguments[0].parameters()) if isinstance(arguments[0], nn.Module) else []
    before = [] if any(map(nn.parameter.is_lazy, held)) else [p.clone() for p in held]
    with pytest.raises(CaptureError) as caught:
        stepgraph.capture(*arguments, **{"passes": "exact"} | options)
    message = str(caught.value)
    assert "\n" not in message
    if before:
        assert all(map(torch.equal, before, arguments[0].parameters()))
        assert all(p.grad is None for p in arguments[0].parameters())
    return message


def test_arguments_in_the_wrong_place():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    order = re.escape("capture takes (model, loss_fn, batch, optimizer)")
    for arguments, message in [
        ((model, loss_fn, optimizer, X), "the batch is of type AdamW"),
        ((model, X, loss_fn), "loss_fn is of type Tensor"),
        ((model, optimizer, loss_fn, X), "loss_fn is of type AdamW"),
        ((loss_fn, model, X), "the model is of type function"),
        ((model.parameters(), loss_fn, X), "the model is of type generator"),
        ((model, loss_fn, model), "the batch is of type Sequential"),
        ((model, loss_fn, lambda: X), "the batch is of type function"),
        ((model, loss_fn, X, torch.optim.AdamW), r"the class AdamW, not.*pass AdamW\(model.parameters\(\)\)"),
        ((model, loss_fn, X, model.parameters()), "the optimizer is of type generator"),
        ((model, nn.MSELoss(), X), "loss_fn is of type MSELoss, not a function of"),
    ]:
        assert re.search(f"{message}.*", message_of(*arguments))
        assert re.search(order, message_of(*arguments))


def test_losses_of_other_arguments():
    model = network()
    assert "loss_fn(x) cannot be called as loss_fn(model, batch): too many" in message_of(model, lambda x: x.sum(), X)
    assert "missing a required argument: 'y'" in message_of(model, lambda model, x, y: x.sum(), X)
    stepgraph.capture(model, lambda model, x, weight=2.0: weight * loss_fn(model, x), X, passes="exact")


@pytest.mark.parametrize("compile", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_scripted_modules(compile):
    assert "module model is a scripted or traced module" in message_of(compile(network()), loss_fn, X)
    model = network()
    model[2] = torch.jit.script(model[2])
    assert "module 2 is a scripted or traced module (RecursiveScriptModule)" in message_of(model, loss_fn, X)


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    assert "module 0 (LazyLinear) takes its shape from its first batch; run the model once" in message_of(
        model, loss_fn, X
    )
    model(X)
    stepgraph.capture(model, loss_fn, X, passes="exact")


class Switching(nn.Module):
    """Takes another module for its second one at its first call, as BigBird does for short sequences."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        if isinstance(self.second, nn.Identity):
            self.second = nn.Linear(4, 4)
        return self.second(self.first(x))


def test_modules_that_forward_replaces():
    model = nn.Sequential(Switching())
    before = model[0].second
    assert "forward replaces module 0.second" in message_of(model, loss_fn, X)
    assert model[0].second is before
    model(X)
    stepgraph.capture(model, loss_fn, X, passes="exact")


def test_sparse_embedding():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    message = message_of(model, loss_fn, torch.tensor([1, 2, 3]), torch.optim.AdamW(model.parameters()))
    assert re.search(r"module 0 gives its parameter a sparse gradient .*use sparse=False", message)


def test_scaled_loss():
    def scaled(model, x):
        return scaler.scale(loss_fn(model, x))

    scaler = torch.amp.GradScaler("cpu")
    assert re.search(r"loss_fn \(.*test_arguments.py:\d+\) scales by a GradScaler", message_of(network(), scaled, X))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    stepgraph.capture(network(), scaled, X, passes="exact")
    real = torch.amp.GradScaler("cpu")
    assert real.scale(torch.ones(())) == real.get_scale()  # as before


class Masked(nn.Module):
    """Writes a token over the positions that a mask picks."""

    def __init__(self, trained):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.randn(4), requires_grad=trained)

    def forward(self, x):
        hidden = self.linear(x).clone()
        hidden[x[:, 0] > 0] = self.token
        return hidden


def test_a_trained_token_written_at_a_mask(check_training):
    """The batch determines the mask, so how many positions it picks is known: another number is another form."""
    check_training(
        Masked(True),
        lambda model, batch: loss_fn(model, batch["x"]),
        [{"x": torch.randn(4, 4)} for _ in range(3)],
    )


def test_a_trained_token_written_at_a_mask_of_activations(check_training):
    check_training(
        nn.ModuleList([nn.Linear(4, 4), Masked(True)]),
        lambda model, batch: loss_fn(model[1], model[0](batch["x"])),
        [{"x": torch.randn(4, 4)} for _ in range(3)],
    )


def test_a_frozen_token_written_at_a_mask(check_training):
    check_training(
        Masked(False),
        lambda model, batch: loss_fn(model, batch["x"]),
        [{"x": torch.randn(4, 4)} for _ in range(3)],
        lambda m: torch.optim.AdamW([m.linear.weight, m.linear.bias], fused=True),
    )


def test_checks_of_values_that_hold_change_nothing(check_training):
    """Such as that of transformers, which counts a batch's image tokens."""

    def checked(model, batch):
        torch._check_tensor_all(batch["x"] < 1e9, lambda: "too large")
        torch._check_tensor_all(torch.arange(3) < 3)
        return F.mse_loss(model(batch["x"]), batch["x"])

    check_training(network(), checked, [{"x": torch.randn(4, 4)}])


def test_checks_of_known_values_are_made():
    def checked(model, x):
        torch._check_tensor_all(torch.arange(3) < 2, lambda: "not below two")
        return loss_fn(model, x)

    with pytest.raises(RuntimeError, match="not below two"):
        stepgraph.capture(network(), checked, X, passes="exact")


@pytest.mark.parametrize(("size", "count"), [(6, 3), (7, 7), (5, 5), (2, 1), (4, 4), (8, 4), (12, 4)])
def test_a_batch_that_accumulate_does_not_divide(size, count):
    """The fewest equal microbatches that are no larger than those of the first batch; all of eager's bits."""
    torch.manual_seed(0)
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (model, twin)]
    step = stepgraph.capture(twin, loss_fn, torch.randn(8, 4), optimizers[1], accumulate=4, passes="exact")
    for batch, parts in ((torch.randn(8, 4), 4), (torch.randn(size, 4), count), (torch.randn(8, 4), 4)):
        for part in batch.chunk(parts):
            (loss_fn(model, part) / parts).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        if size % 4 and batch.shape[0] == size:
            with pytest.warns(UserWarning, match=f"accumulate=4 does not divide a batch of {size}.* {count} micro"):
                step(batch)
        else:
            step(batch)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_batch_whose_tensors_no_number_divides():
    def two(model, batch):
        return model(batch[0]).square().mean() + batch[1].sum()

    step = stepgraph.capture(network(), two, (torch.randn(8, 4), torch.randn(4)), accumulate=4, passes="exact")
    with pytest.raises(ValueError, match="accumulate=4 does not divide the batch's first dimension 6"):
        step((torch.randn(6, 4), torch.randn(5)))
