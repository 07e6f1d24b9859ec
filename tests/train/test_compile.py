"""``stepgraph compile`` makes the step that ``stepgraph train --saved-steps`` loads, on one process and for ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepgraph

LOADED = "saved step loaded"
EXACT = [
    *("--passes", "exact", "--model.n-layers", "1", "--steps", "2", "--warmup-steps", "1", "--val-batches", "1"),
    *("--checkpoint-every", "2"),
]


def losses(trainer, folder):
    found = trainer.metrics(folder, "loss", "grad_norm")
    assert len(found) == 2
    return found


def test_train_loads_what_compile_made(trainer, tmp_path, capfd):
    options = [*EXACT, "--accumulate", "2", "--on-nonfinite", "skip"]
    compiled = trainer.main(["compile", *trainer.arguments(*options, "--out", tmp_path / "steps")[1:]])
    made = capfd.readouterr().out
    assert compiled == 0 and "rank 0: no saved step matches" in made
    assert f"saved in {tmp_path / 'steps'} as step-" in made
    # With --verify a run ends before its first step if one bit is not eager's.
    assert trainer.here(*options, "--verify", "--saved-steps", tmp_path / "steps", "--out", tmp_path / "run") == 0
    said = capfd.readouterr().out
    assert LOADED in said and "nodes after passes: " in said and "bitwise" in said, said
    assert len(trainer.metrics(tmp_path / "run", "loss")) == 2


@pytest.mark.long
def test_ranks_load_what_one_process_compiled(trainer, tmp_path):
    options = [*EXACT, "--mesh", "fsdp=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(stepgraph.__file__).parents[1])}

    def command(*words):
        call = [sys.executable, "-m", "stepgraph", *map(str, words)]
        done = subprocess.run(call, env=environment, text=True, capture_output=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    made = command("compile", *trainer.arguments(*options, "--out", tmp_path / "steps")[1:])
    assert "rank 0: no saved step matches" in made and f"rank 1: {LOADED}" in made
    for step in (tmp_path / "steps", "off"):
        run = tmp_path / f"run-{Path(step).name}"
        said = command(*trainer.arguments(*options, "--nproc", "2", "--saved-steps", step, "--out", run))
        assert (LOADED in said) == (step != "off"), said
    assert losses(trainer, tmp_path / "run-steps") == losses(trainer, tmp_path / "run-off")
