"""Every example runs in seconds on a CPU by the command it states, and every recipe is a valid run."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepgraph import cli
from stepgraph.config.files import read_config
from stepgraph.passes import PASSES
from tests import forked

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))
COMMAND = re.compile(r"^CPU, a few seconds: +(python|torchrun --nproc-per-node \d+) examples/(\w+)\.py$", re.MULTILINE)
#: What a run of each example must print.
PRINTS = {
    "custom_optimizer": r"step 20: loss.*bitwise equal to eager",
    "custom_pass": r"2 of 3 products became sums.*bitwise equal to eager",
    "distillation": r"step 1: KL 0\.0.*step 10: KL 0\.0",
    "dpo": r"step 1: loss 0\.6931, margin 0\.000.*step 30: loss 0\.[56].*bitwise equal to eager",
    "ema": r"distance of the average.*bitwise equal to eager.*error without noise: 0\.\d+ of the last weights",
    "gan": r"step 500: critic 1\.[34].*mean radius (0\.9|1\.[01]).*bitwise equal to eager",
    "graph_trainer": r"train_loss",
    "grpo": r"step 1: reward 0\.0.*step 25: reward (0\.[5-9]|1).*bitwise equal to eager",
    "lora": r"adapter_model\.safetensors",
    "moe_ranks": r"step 1: loss 5\.\d+, repeated 0\nstep 5: loss",
    "packing": r"200 examples in \d+ rows of 256 tokens.*train_loss",
    "pipeline": r"rank 1: 147,776 parameters.*step 5: loss 4\.",
    "own_loop": r"step 20: loss.*bitwise equal to eager",
    "verify_change": r"passes=exact:\nverify: bitwise.*the pass fuse_norm",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script, monkeypatch, capsys):
    text = script.read_text()
    launcher, named = COMMAND.search(text).groups()
    assert named == script.stem
    assert re.search(rf"^(Two )?GPUs?\b.* examples/{named}\.py", text, re.MULTILINE), "it states its GPU command"
    if launcher == "python":
        monkeypatch.setattr(sys, "argv", [str(script)])
        registered = dict(PASSES)
        runpy.run_path(str(script), run_name="__main__")
        for name in set(PASSES) - set(registered):
            del PASSES[name]
        printed = capsys.readouterr().out
    else:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": forked.python()}  # of the ranks
        own |= {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
        run = subprocess.run(
            [forked.python(), "-m", "torch.distributed.run", *launcher.split()[1:], script],
            capture_output=True,
            text=True,
            timeout=300,
            env=forked.environment() | own,
        )
        assert run.returncode == 0, run.stderr
        printed = run.stdout
    assert re.search(PRINTS[script.stem], printed, re.DOTALL), printed


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_a_valid_run(recipe):
    assert f"--config examples/recipes/{recipe.name}" in recipe.read_text(), "its first lines name the command"
    config, given = read_config(recipe, None)
    config.validate()
    assert given


def test_a_recipe_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A recipe is a run's options in a file, and the command line overrides it. " * 200)
    recipe = ROOT / "examples" / "recipes" / "pretrain-debug.toml"
    small = ["--steps=2", "--seq-len=32", "--model.dim=48", "--model.n-layers=1", "--data=text.txt", "--out=run"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--config", str(recipe), *small])
    assert stop.value.code == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "summary.json").exists()
