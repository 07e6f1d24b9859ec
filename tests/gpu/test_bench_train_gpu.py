"""``stepgraph bench train`` on GPUs: memory and exposed communication, and torchtitan where it is installed."""

import gzip
import json

import pytest
import torch

from stepgraph import bench
from stepgraph.bench import results
from stepgraph.bench.train import titan


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_measures_memory_and_communication(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    mesh = {1: "fsdp=1", 2: "fsdp=2", 4: "fsdp=2,tp=2"}[ranks]
    path = tmp_path / "train.json"
    words = f"train llama3-debug --model.n-kv-heads 2 --mesh {mesh} --precision bf16 --steps 3"
    assert bench.main([*words.split(), "--json", str(path), "--traces", str(tmp_path)]) == 0
    _, settings, (ours, peer) = results.read(path)
    assert ours.error is None and ours.losses[1] < ours.losses[0]
    assert 0 < ours.peak_mem_gib <= ours.peak_reserved_gib
    exposed = ours.exposure
    assert 0 <= exposed["exposed_ms"] <= exposed["communication_ms"] <= exposed["window_ms"]
    assert (exposed["communication_ms"] > 0) == (ranks > 1) and len(ours.exposure_all) == ranks
    trace = json.loads(gzip.decompress((tmp_path / "stepgraph.json.gz").read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    if peer.unavailable is None:  # torchtitan trains the same: same weights, same tokens, same losses
        assert peer.versions["torchtitan"] == titan.VERSION and peer.error is None
        assert settings["models"]["llama3-debug"]["losses"].startswith("losses agree")
