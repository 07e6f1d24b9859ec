"""One preset's step, alone or on the ranks that torchrun started: seconds until it is ready, its time and its memory.

Run it in two checkouts, in turns on one machine, to compare them. Unlike ``stepgraph bench`` it accumulates. FIELDS:
JSON of `TrainConfig`'s fields. Prints one line of JSON.

    python benchmarks/step.py golf '{}'
    torchrun --nproc-per-node 2 benchmarks/step.py llama3-1b '{"mesh": "fsdp=2", "accumulate": 8}' --steps 6
"""

import argparse
import dataclasses
import json
import statistics
import time

import torch
import torch.distributed as dist

from stepgraph import parallel
from stepgraph.config import build
from stepgraph.config.presets import PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("fields", type=json.loads)
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed, after three")
    options = parser.parse_args()
    config = dataclasses.replace(PRESETS[options.preset](), **{"steps": 10_000} | options.fields)
    config.validate()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with parallel.started(config.mesh_spec, device.type) as mesh:
        row = measure(config, device, mesh, options.steps)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(json.dumps({"preset": options.preset, **options.fields, **row}), flush=True)


def measure(config, device: torch.device, mesh: parallel.Mesh | None, steps: int) -> dict:
    """Median, least and most milliseconds of ``steps`` steps on one batch; losses of the first three."""
    build.seed_all(0)
    model = build.build_model(config, device, mesh)
    optimizer = build.build_optimizer(config, model)
    loss_fn = build.build_loss(config, device, mesh)
    shape = (config.accumulate * config.batch_size, config.seq_len)
    generator = torch.Generator().manual_seed(1 + (mesh.dp_place if mesh else 0))
    ids = torch.randint(0, config.model.vocab_size, shape, generator=generator).to(device)
    batch = {"tokens": ids, "targets": ids.roll(-1, 1)}
    start = time.perf_counter()
    step = build.build_step(config, model, loss_fn, build.example_batch(config, device), optimizer, None)
    ready = time.perf_counter()
    losses = [step(batch).item() for _ in range(3)]
    first = time.perf_counter()
    times = []
    for _ in range(steps):
        _wait(device)
        begin = time.perf_counter()
        step(batch)
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return {
        "step_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "ready_s": ready - start,
        "three_steps_s": first - ready,
        "losses": losses,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
