"""The pictures of benchmarks/ can be drawn from their records."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["h200_golf", "h200_train_8b_fsdp2", "h100_models", "h200_layer_norm"])
def test_a_record_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "chart.png"
    subprocess.run([sys.executable, BENCHMARKS / "plot.py", BENCHMARKS / f"{name}.json", png], check=True)
    assert png.read_bytes().startswith(b"\x89PNG")
