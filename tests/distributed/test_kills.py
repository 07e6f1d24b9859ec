"""Runs killed at any moment, as `benchmarks/kills.py` does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kills.py"


def rows(path: Path, *words: object) -> list[dict]:
    command = [sys.executable, PROGRAM, *words, "--json", path / "kills.json"]
    subprocess.run(list(map(str, command)), check=True, cwd=PROGRAM.parents[1])
    return json.loads((path / "kills.json").read_text())["rows"]


HUNDRED = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("ranks", "kills"), [(2, 1), pytest.param(1, 50, marks=HUNDRED), pytest.param(2, 50, marks=HUNDRED)]
)
def test_a_run_killed_anywhere_ends_as_if_it_was_not(ranks, kills, tmp_path):
    (row,) = rows(tmp_path, "--anywhere", "--kills", kills, "--ranks", ranks, "--seed", ranks)
    assert (row["kills"], row["bitwise"]) == (kills, True) and sum(row["where"].values()) == kills


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_runs_go_on_bitwise(ranks, tmp_path):
    (row,) = rows(tmp_path, "--kills", 3, "--ranks", ranks, "--seed", 1)
    assert (row["ranks"], row["kills"], row["bitwise"]) == (ranks, 3, True) and len(row["resumed_from"]) == 3
