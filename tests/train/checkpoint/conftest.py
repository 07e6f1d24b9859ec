"""A run folder with checkpoints to damage, resume and read."""

import pytest

from stepgraph.train.checkpoint.checkpointer import Checkpointer
from tests.train.checkpoint.cases import build, seed_all, train


@pytest.fixture
def saved(tmp_path):
    """A run folder with steps 1 and 2 and the state as it was at step 2."""
    seed_all(0)
    state = build(1)
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    train(state, 1)
    checkpointer.save(1, state)
    train(state, 1)
    checkpointer.save(2, state)
    return checkpointer, state
