"""Architectures of `transformers`, from tiny configurations, bit for bit with their update; CI takes the quick ones."""

import collections
import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

import stepgraph
from tests.capture.architectures import ARCHITECTURES, Architecture, loss_fn

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_spec = importlib.util.spec_from_file_location("benchmark_model_classes", BENCHMARKS / "model_classes.py")
sweep = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sweep)

ROWS = [
    pytest.param(row, id=row.name, marks=[] if row.quick else [pytest.mark.long])
    for row in ARCHITECTURES
    if not row.refused
]
REFUSED = [pytest.param(row, id=row.name) for row in ARCHITECTURES if row.refused]

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("row", ROWS)
def test_bitwise_equal_to_eager(check_training, row: Architecture):
    batches = [row.batch() for _ in range(2)]
    check_training(row.build(), loss_fn, batches, lambda m: adamw(m.parameters()), max_grad_norm=1.0, steps=3)


@pytest.mark.parametrize("row", ROWS)
def test_accumulated_bitwise_equal_to_eager(check_training, row: Architecture):
    batches = [row.batch() for _ in range(2)]
    check_training(row.build(), loss_fn, batches, lambda m: adamw(m.parameters(), fused=True), accumulate=2, steps=2)


@pytest.mark.parametrize("row", REFUSED)
def test_refused_in_one_line(row: Architecture):
    with pytest.raises(stepgraph.CaptureError, match=row.refused) as caught:
        stepgraph.capture(row.build(), loss_fn, row.batch(), passes="exact")
    assert "\n" not in str(caught.value)


CLASSES = {
    "Qwen2VLForConditionalGeneration": "",
    "Qwen3VLMoeForConditionalGeneration": "",
    "SmolVLMForConditionalGeneration": "",
    "Mistral3ForConditionalGeneration": "",
    "HubertForCTC": "",
    "EncodecModel": "",
    "T5Gemma2ForConditionalGeneration": "",
    "LaraMiniForCausalLM": "",
    "LongcatFlashForCausalLM": "which experts have tokens.*stepgraph.kernels.moe",
}


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_the_sweep(name: str):
    found = sweep.measured(name)
    refused = CLASSES[name]
    assert found["result"] == ("refused" if refused else "equal") and re.search(refused, found.get("line", ""))


def test_the_record_of_the_sweep():
    record = json.loads((BENCHMARKS / "model_classes.json").read_text())
    results = collections.Counter(row["result"] for row in record["classes"].values())
    assert record["counts"] == results and set(results) == {"equal", "refused", "not trained"}
    assert record["trained"] == results["equal"] + results["refused"] >= 350
    assert results["refused"] <= 0.05 * record["trained"]


def test_names_are_unique():
    names = [row.name for row in ARCHITECTURES]
    assert len(set(names)) == len(names) >= 40
