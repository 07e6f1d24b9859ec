"""How long capture takes: Llama 3 8B at sequence 8192 with optimizer and clipping, next to a bare ``make_fx``.

The bare trace holds forward, loss and backward only, without provenance, optimizer or clipping. Nothing is computed:
all tensors are fake. Writes ``capture_cpu.json`` next to this file, with the environment it was measured in.

    python benchmarks/capture.py [--layers 2 4 8 16 32] [--repeats 3] [--json FILE]
"""

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.capture import trace_step
from stepgraph.config.environment import environment
from stepgraph.models import Llama3, llama3_8b, next_token_loss

LENGTH = 8192


class Seconds(NamedTuple):
    """Wall time, and time this process spent on a processor."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Seconds":
        gc.collect()
        return cls(time.perf_counter(), time.process_time())

    def since(self) -> "Seconds":
        return Seconds(time.perf_counter() - self.wall, time.process_time() - self.cpu)


def model_and_batch(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama 3 8B with ``layers`` layers, in bf16 on the meta device, and a batch of one sequence."""
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(llama3_8b(), n_layers=layers, max_seq_len=LENGTH)).bfloat16()
        ids = torch.empty(1, LENGTH, dtype=torch.int64)
    return model, {"tokens": ids, "targets": ids}


def bare(layers: int) -> tuple[Seconds, int]:
    """Time and operator nodes of a plain ``make_fx`` of forward, loss and backward."""
    model, batch = model_and_batch(layers)
    mode = FakeTensorMode()
    with mode:
        named = [*model.named_parameters(), *model.named_buffers()]
        state = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in named}
        fakes = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in batch.items()}
    names = [name for name, _ in model.named_parameters()]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return next_token_loss(self.model, batch)

    def function(state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        state = {k: v.requires_grad_(k in names) for k, v in state.items()}
        loss = torch.func.functional_call(Loss(), {f"model.{k}": v for k, v in state.items()}, (batch,))
        return [loss, *torch.autograd.grad(loss, [state[name] for name in names])]

    start = Seconds.now()
    with mode:
        graph = make_fx(function)(state, fakes).graph
    return start.since(), sum(n.op == "call_function" for n in graph.nodes)


def captured(layers: int) -> tuple[Seconds, int]:
    """Time and operator nodes of a capture with provenance, clipping and fused AdamW."""
    model, batch = model_and_batch(layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    start = Seconds.now()
    step = trace_step(model, next_token_loss, batch, optimizer, max_grad_norm=1.0).step
    return start.since(), sum(1 for _ in step.nodes())


def measure(layers: list[int], repeats: int) -> list[dict[str, float]]:
    """One row per depth: the fastest of ``repeats`` traces of each kind, which alternate.

    ``*_s`` is wall time, ``*_cpu_s`` the process's own, which other work on the machine lengthens less.
    """
    bare(1)
    captured(1)  # what torch imports lazily is loaded now
    rows = []
    for n in layers:
        bares, captures = zip(*[(bare(n), captured(n)) for _ in range(repeats)], strict=True)
        (bare_s, bare_nodes), (capture_s, nodes) = min(bares), min(captures)
        row = {"layers": n, "nodes": nodes, "capture_s": capture_s.wall, "capture_cpu_s": capture_s.cpu}
        row |= {"bare_nodes": bare_nodes, "bare_make_fx_s": bare_s.wall, "bare_make_fx_cpu_s": bare_s.cpu}
        row |= {"ratio": capture_s.cpu / bare_s.cpu, "us_per_node": capture_s.cpu / nodes * 1e6}
        rows.append({key: round(value, 3) for key, value in row.items()})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("capture_cpu.json"))
    options = parser.parse_args()
    rows = measure(options.layers, options.repeats)
    result = {"model": "llama3-8b", "seq_len": LENGTH, "rows": rows, "environment": environment()}
    options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
