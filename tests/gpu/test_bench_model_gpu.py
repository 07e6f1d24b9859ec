"""``stepgraph bench model`` on a GPU: models built at once, and where the time of their steps goes."""

import pytest
import torch

from stepgraph import bench
from stepgraph.bench import results
from stepgraph.costs.hardware import known_gpu

NAMES = ("nanogpt-124m-debug", "t5-base-debug")


def test_the_record_says_where_a_step_goes(tmp_path, capsys):
    pytest.importorskip("transformers")
    words = "--providers eager,stepgraph --together 2 --models-together 2 --steps 3 --rounds 2"
    path = tmp_path / "record.json"
    assert bench.main(["model", *NAMES, *words.split(), "--json", str(path), "--profile", str(tmp_path)]) == 0
    _, settings, rows = results.read(path)
    assert [*settings["models"]] == [*NAMES] and len(rows) == 4
    for row in rows:
        assert row.step_ms and row.error is row.profile_error is row.disagreement is None
        assert (row.where is None) == (row.provider == "eager")
    for row in rows[1::2]:
        spent = row.where["ms"]
        assert spent["products"] > 0 and spent["host gaps"] >= 0 and min(spent.values()) >= 0
        assert bool(row.where["limit"]) == (known_gpu(torch.cuda.get_device_name()) is not None)
        assert "`products`" in (tmp_path / f"{row.model}.stepgraph.md").read_text()
    # T5's attention to the encoder has a mask of zeros, which makes torch take a slower kernel.
    (line,) = [line for line in rows[3].passes if line.startswith("attention_windows")]
    assert "1 causal or without a mask" in line
    assert "least gain" in capsys.readouterr().out
