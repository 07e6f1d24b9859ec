"""Every example runs in seconds on a CPU, and every recipe is a configuration that the trainer takes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepgraph.config.files import read_config

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))
#: What a run of each example must print.
PRINTS = {
    "custom_pass": r"2 of 3 products became sums.*bitwise equal to eager",
    "distillation": r"step 1: KL 0\.0.*step 10: KL 0\.0",
    "graph_trainer": r"train_loss",
    "lora": r"adapter_model\.safetensors",
    "packing": r"200 examples in \d+ rows of 256 tokens.*train_loss",
    "own_loop": r"step 20: loss.*bitwise equal to eager",
    "verify_change": r"passes=exact:\nverify: bitwise.*the pass fuse_norm",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script):
    assert "CPU, a few seconds:" in script.read_text(), "its docstring names the command"
    run = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr
    assert re.search(PRINTS[script.stem], run.stdout, re.DOTALL), run.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_a_valid_run(recipe):
    assert f"--config examples/recipes/{recipe.name}" in recipe.read_text(), "its first lines name the command"
    config, given = read_config(recipe, None)
    config.validate()
    assert given
