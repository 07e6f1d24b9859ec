"""The worked changes of CONTRIBUTING.md apply to this tree, and the command under each passes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKED = re.compile(r"### (Add [^\n]+)\n.*?```diff\n(.*?)```\n\n```\npython ([^\n]+)\n```", re.DOTALL)
CHANGES = {name: (diff, command) for name, diff, command in WORKED.findall((ROOT / "CONTRIBUTING.md").read_text())}


def test_the_page_shows_a_pass_two_options_a_model_and_a_kernel():
    assert [name.split()[-1] for name in CHANGES] == ["pass", "step", "mesh", "model", "kernel"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_worked_change_applies_and_works(name, tmp_path):
    diff, command = CHANGES[name]
    for part in (
        "stepgraph",
        "docs",
        "tests",
        "benchmarks/README.md",
        "README.md",
        "CONTRIBUTING.md",
        "pyproject.toml",
    ):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / part).parent.mkdir(exist_ok=True)
            shutil.copy(source, tmp_path / part)
    # -C1: a line of context is enough, so that a change of a neighbouring line does not break the page.
    apply = ["git", "apply", "-C1", "-"]
    done = subprocess.run(apply, cwd=tmp_path, input=diff, text=True, capture_output=True)
    assert done.returncode == 0, f"regenerate the diff of {name!r}: {done.stderr}"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    run = f'"{sys.executable}" {command}'
    done = subprocess.run(run, shell=True, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
