"""``stepgraph bench norm`` on a GPU, and torch.compile's backward under a CUDA graph."""

import pytest

from stepgraph import bench
from stepgraph.bench import results


@pytest.mark.timed
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_every_installed_provider_is_right_and_timed(op, tmp_path):
    path = tmp_path / "norm.json"
    words = f"norm --op {op} --shapes 4096x1024,16384x4096 --providers ours,eager,compile --json {path}"
    assert bench.main(words.split()) == 0
    rows = results.read(path)[2]
    assert [row.error or row.wrong for row in rows] == [None] * 12
    assert all(row.timing == "graph" and row.ms > 0 and row.pct_copy < 110 for row in rows)
