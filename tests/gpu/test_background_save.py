"""Checkpoints behind a run on a GPU: what is written is the state as it was, and the copy is page-locked."""

import copy

import torch
from torch import nn

from stepgraph.train.checkpoint.background import BackgroundSaves
from stepgraph.train.checkpoint.checkpointer import Checkpointer


def test_the_state_is_copied_before_the_next_step_changes_it(tmp_path):
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    saves = BackgroundSaves(Checkpointer(tmp_path / "checkpoints"))
    for number in (1, 2):
        step()
        as_it_was = copy.deepcopy([p.detach() for p in model.parameters()])
        waited = saves.begin(number, {"model": model, "optimizer": optimizer})
        step()  # while it is written
        saves.finish()
        print(f"waited {waited:.3f} s", saves.check())
        assert all(t.is_pinned() for t in saves._copies.values() if t.dim())
        saves.checkpointer.load(saves.checkpointer.folder, {"model": model, "optimizer": optimizer}, rng=False)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), as_it_was, strict=True))
