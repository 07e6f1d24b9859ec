"""Runs killed while they save in the background, as `benchmarks/kills.py` records them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_runs_go_on_bitwise(ranks, tmp_path):
    record = tmp_path / "kills.json"
    command = [sys.executable, PROGRAM, "--kills", "3", "--ranks", str(ranks), "--seed", "1", "--json", record]
    subprocess.run(list(map(str, command)), check=True, cwd=PROGRAM.parents[1])
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["ranks"], row["kills"], row["bitwise"]) == (ranks, 3, True) and len(row["resumed_from"]) == 3
