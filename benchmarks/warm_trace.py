"""What a warm start computes on the host: a Qwen3 of 28 narrow layers from ``transformers``, captured in this process
with a folder of saved steps, once to fill it and then to load from it. All passes but Inductor run, so the seconds are
those of Python: trace, key, passes and saving, or trace, key and loading. Seconds are processor time of this process,
the least of ``--repeats`` warm captures.

    python benchmarks/warm_trace.py [--layers 28] [--repeats 3] [--json FILE]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import stepgraph
from stepgraph.config.environment import environment


def model_of(layers: int) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


def captured(model: torch.nn.Module, folder: str) -> dict[str, Any]:
    """Seconds of one capture."""
    tokens = torch.zeros((2, 32), dtype=torch.int64)
    batch, optimizer = {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(model.parameters(), fused=True)
    began = time.process_time()
    step = stepgraph.capture(
        model, loss_fn, batch, optimizer, max_grad_norm=1.0, disable=["inductor"], saved=folder
    )  # fmt: skip
    seconds = time.process_time() - began
    return {"loaded": step.saved.loaded, "seconds": round(seconds, 2), "nodes": len(step.graph.graph.nodes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        captured(model_of(1), f"{folder}/first")  # imports
        model = model_of(options.layers)
        cold = captured(model, f"{folder}/steps")
        warm = min((captured(model, f"{folder}/steps") for _ in range(options.repeats)), key=lambda one: one["seconds"])
    record = {"environment": environment(), "layers": options.layers, "cold": cold, "warm": warm}
    print(f"cold {cold}, warm {warm}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
