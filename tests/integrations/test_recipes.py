"""The recipes of docs/integrations.md for accelerate and Lightning: losses and weights of the loops they replace."""

import copy
import warnings

import pytest
import torch
from torch import nn

import stepgraph

STEPS = 6


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(37, 16), nn.LayerNorm(16), nn.Linear(16, 37))
    generator = torch.Generator().manual_seed(1)
    return model, [torch.randint(37, (4, 9), generator=generator) for _ in range(STEPS)]


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(-1, 1).flatten())


def same_weights(first, second):
    return all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # what other tests of this process set

    def prepared(model):
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    model, batches = parts()
    twin = copy.deepcopy(model)
    accelerator, expected, optimizer, scheduler = prepared(twin)
    losses = []
    for batch in batches:
        loss = loss_fn(expected, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    _, given, optimizer, scheduler = prepared(model)
    step = stepgraph.capture(given, loss_fn, batches[0], optimizer, max_grad_norm=1.0, passes="exact")
    mine = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches:
            mine.append(step(batch).item())
            scheduler.step()
    assert mine == losses and same_weights(model, twin)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model, capture):
            super().__init__()
            self.model, self.capture, self.losses = model, capture, []
            self.automatic_optimization = not capture

        def training_step(self, batch, index):
            if not self.capture:
                loss = loss_fn(self.model, batch)
            else:
                optimizer = self.optimizers()
                if self.captured is None:
                    self.captured = stepgraph.capture(
                        self.model, loss_fn, batch, optimizer.optimizer, max_grad_norm=1.0, passes="exact"
                    )
                loss = self.captured(batch)
                optimizer.step()
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            self.captured = None
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    model, batches = parts()
    twin = copy.deepcopy(model)
    runs = []
    for which, capture in ((twin, False), (model, True)):
        module = Module(which, capture)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path / str(capture),
            **({} if capture else {"gradient_clip_val": 1.0}),
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # with another optimizer
        runs.append((module.losses, trainer.global_step))
    assert runs[0] == runs[1] and runs[0][1] == 2 * STEPS
    assert same_weights(model, twin)
    saved = torch.load(next((tmp_path / "True").rglob("*.ckpt")), weights_only=False)
    assert set(saved["optimizer_states"][0]["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_fabric():
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    model, batches = parts()
    twin = copy.deepcopy(model)
    ends = []
    for which in (twin, model):
        module, optimizer = fabric.setup(which, torch.optim.AdamW(which.parameters(), lr=1e-2))
        if which is model:
            plain = optimizer.optimizer
            step = stepgraph.capture(module.module, loss_fn, batches[0], plain, max_grad_norm=1.0, passes="exact")
        losses = []
        for batch in batches:
            if which is model:
                loss = step(batch)
            else:
                optimizer.zero_grad()
                loss = loss_fn(module, batch)
                fabric.backward(loss)
                fabric.clip_gradients(module, optimizer, max_norm=1.0)
                optimizer.step()
            losses.append(loss.item())
        ends.append(losses)
    assert ends[0] == ends[1] and same_weights(model, twin)


def test_fabrics_own_precision_is_refused_with_a_fix():
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, batches = parts()
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with pytest.raises(ValueError, match=r"fabric.backward.*; capture model.module and optimizer.optimizer, and use"):
        stepgraph.capture(module, loss_fn, batches[0], optimizer.optimizer, passes="exact")
