"""A run over many lengths of the batch, as fine-tuning pads them: stepgraph next to ``torch.compile``, each in its own
process with an empty cache on disk.

Every provider trains the same Qwen3 (random weights) on the same batches, by AdamW with clipping. ``padded``: the
batches are padded to a few lengths. Writes ``lengths.json`` next to this file.

    python benchmarks/lengths.py [--device cuda] [--layers 4] [--lengths 40] [--json FILE] [--providers NAME ...]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import stepgraph
from stepgraph.config.environment import environment
from stepgraph.integrations import PadToLengths

#: Name -> (what runs the step, whether batches are padded to few lengths).
PROVIDERS: dict[str, tuple[str, bool]] = {
    "eager": ("eager", False),
    "torch.compile(dynamic=True)": ("dynamic", False),
    "torch.compile, automatic": ("automatic", False),
    "stepgraph, any_length": ("any_length", False),
    "torch.compile(dynamic=False), padded": ("static", True),
    "stepgraph, padded": ("stepgraph", True),
    "stepgraph, any_length, padded": ("any_length", True),
}
CLIP = 1.0


def build(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // options.head,
        num_key_value_heads=max(1, options.width // options.head // 2),
        head_dim=options.head,
        max_position_embeddings=options.longest,
    )
    model = AutoModelForCausalLM.from_config(config).to(options.device, getattr(torch, options.dtype))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batches(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Each of the lengths ``epochs`` times, in a random order each time."""
    draw = random.Random(0)
    lengths = draw.sample(range(options.longest // 8, options.longest + 1), options.lengths)
    order = [length for _ in range(options.epochs) for length in draw.sample(lengths, len(lengths))]
    generator = torch.Generator().manual_seed(0)
    made = (torch.randint(options.vocab, (options.batch, length), generator=generator) for length in order)
    return [{"input_ids": ids, "labels": ids} for ids in made]


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


def stepper(kind: str, options: argparse.Namespace, first: dict[str, torch.Tensor]) -> tuple[Callable, Callable]:
    """(what runs one step, how many forms it has compiled or captured so far)."""
    model, optimizer = build(options)
    if kind in ("stepgraph", "any_length"):
        passes = stepgraph.StepOptions(any_length=kind == "any_length")
        step = stepgraph.capture(model, loss_of, first, optimizer, max_grad_norm=CLIP, passes=passes)
        return step, lambda: len(step._forms)
    dynamic = {"dynamic": True, "static": False, "automatic": None}
    loss_fn = loss_of if kind == "eager" else torch.compile(loss_of, dynamic=dynamic[kind])

    def run(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run, lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One provider over all batches."""
    kind, padded = PROVIDERS[name]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, options.count)
    data = batches(options)
    sizes = [batch["input_ids"].shape[1] for batch in data]
    # Each serves as many of the sizes as the others, in multiples of 8.
    ordered = sorted(sizes)
    ends = [ordered[len(ordered) * (i + 1) // options.count - 1] for i in range(options.count)]
    lengths = tuple(dict.fromkeys(-(-end // 8) * 8 for end in ends))
    if padded:
        data = [PadToLengths(lengths, causal=True)(batch) for batch in data]
    data = [{key: value.to(options.device) for key, value in batch.items()} for batch in data]
    seconds, busy, losses = [], [], []
    start = time.perf_counter()
    run, forms = stepper(kind, options, data[0])
    seconds_to_capture = time.perf_counter() - start
    for batch in data:
        begin, busy_before = time.perf_counter(), time.process_time()
        losses.append(run(batch).item())
        seconds.append(time.perf_counter() - begin)
        busy.append(time.process_time() - busy_before)
    seconds[0] += seconds_to_capture
    firsts: dict[int, float] = {}  # by the length as it is run
    for batch, taken in zip(data, seconds, strict=True):
        firsts.setdefault(batch["input_ids"].shape[1], taken)
    new = list(firsts.values())
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
    return {
        "provider": name,
        "total_s": sum(seconds),
        # Of this process and of compilers, which other work on the machine lengthens less.
        "total_cpu_s": sum(os.times()[:4]),
        "step_s": statistics.mean(seconds[-options.lengths :]),  # the last time over all lengths
        "step_cpu_s": statistics.mean(busy[-options.lengths :]),
        "first_length_s": new[0],
        "second_length_s": new[1],
        "later_lengths_s": statistics.mean(new[2:]),
        "forms": forms() if kind != "eager" else 0,
        "lengths": lengths if padded else options.lengths,
        "tokens": sum(batch["input_ids"].numel() for batch in data),
        "losses": [losses[0], losses[-1]],
        "peak_gib": peak,
    }


def apart(name: str, arguments: list[str]) -> dict[str, Any]:
    """`measure` in a process of its own, with an empty cache of Inductor."""
    with tempfile.TemporaryDirectory() as cache:
        variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, *arguments, "--child", name]
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--head", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--lengths", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--count", type=int, default=4, help="lengths to pad to")
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("lengths.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "child", "providers")}
    record = {"settings": settings, "rows": [], "environment": environment()}
    for name in options.providers:
        record["rows"].append(apart(name, sys.argv[1:]))
        print(json.dumps(record["rows"][-1]), flush=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
