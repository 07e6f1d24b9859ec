"""Steps of one long sequence: AdamW's state and the inputs of blocks in host memory, MLPs, norms and head in parts.

    python benchmarks/long_sequence.py --seq-len 131072 --tiles 8 [--preset llama3-8b] [--layers N] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/long_sequence.py --mesh cp=2 ...

Random weights and tokens, bf16 with fp32 masters. Each step is timed by itself, the first, which compiles nothing but
allocates host memory, included. Time of attention grows with the square of the length: fewer ``--layers`` show longer
ones, and the forecast what all of them take.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch

import stepgraph
from stepgraph import parallel
from stepgraph.config.environment import environment
from stepgraph.config.presets import PRESETS
from stepgraph.costs.memory import peak_bytes
from stepgraph.models import Llama3, next_token_loss
from stepgraph.passes import StepOptions


def main() -> None:
    """Print the forecast and the steps, and write them to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiles", type=int, default=8)
    parser.add_argument("--memory", default="full,layers.*=offload")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--inductor", default="full")
    parser.add_argument("--keep-optimizer", action="store_true", help="on the GPU")
    parser.add_argument("--cuda-graph", action="store_true", help="the second step then records and the third replays")
    parser.add_argument(
        "--mesh", type=parallel.MeshSpec.parse, help="such as cp=2; the optimizer then is torch's AdamW"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with parallel.started(args.mesh, "cuda" if torch.cuda.is_available() else "cpu") as mesh:
        measure(args, mesh)


def measure(args: argparse.Namespace, mesh: parallel.Mesh | None) -> None:
    """The steps of this rank; the first one prints and writes them."""
    config = PRESETS[args.preset]().model
    config = dataclasses.replace(config, n_layers=args.layers or config.n_layers, max_seq_len=args.seq_len)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama3(config)
    if mesh is None:
        for param in model.parameters():  # the RoPE tables stay fp32
            param.data = param.data.to(torch.bfloat16)
        model.to_empty(device=device)
        model.init_weights()
        loss_fn, optimizer = next_token_loss, stepgraph.MasterAdamW(model.parameters(), lr=1e-5)
    else:
        parallel.parallelize(model, mesh, device=device, param_dtype=torch.bfloat16)
        model.init_weights(0, parallel.local_parts(model))
        loss_fn = parallel.next_token_loss(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(config.vocab_size, (1, args.seq_len + 1), device=device)
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    options = StepOptions(
        memory=args.memory, tiles=args.tiles, attention=args.attention, cuda_graph=args.cuda_graph,
        offload_optimizer=not args.keep_optimizer, inductor=args.inductor,
    )  # fmt: skip
    start = time.perf_counter()
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0, passes=options)
    held = sum(v.nbytes for slots in optimizer.state.values() for v in slots.values() if not v.is_cuda)
    row = {
        "seq_len": args.seq_len, "mesh": args.mesh and str(args.mesh), "layers": config.n_layers, "tiles": args.tiles,
        "memory": args.memory,
        "offload_optimizer": not args.keep_optimizer, "inductor": args.inductor,
        "capture_s": round(time.perf_counter() - start, 1),
        "forecast_gib": round(peak_bytes(step.program, fused=True) / 2**30, 2),
        "host_gib": round(held / 2**30, 2),
        "passes_s": {report.name: round(report.apply_s, 1) for report in step.program.reports if report.apply_s > 0.5},
        "compile_s": round(sum(report.compile_s for report in step.program.reports), 1),
        "steps": [],
    }  # fmt: skip
    first = mesh is None or torch.distributed.get_rank() == 0
    if first:
        print(json.dumps(row), flush=True)
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = step(batch).item()
        took = time.perf_counter() - start
        found = {"loss": round(loss, 4), "seconds": round(took, 2), "tokens_per_s": round(args.seq_len / took)}
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            found |= dict(zip(("allocated_gib", "reserved_gib"), (round(m() / 2**30, 2) for m in memory), strict=True))
        row["steps"].append(found)
        if first:
            print(json.dumps(found), flush=True)
        copied = [memory.nbytes for memory in step._session.host_memory.values()]
        row["activations_host_gib"] = round(sum(copied) / 2**30, 2)
        if first and args.json is not None:  # after each step: one may take minutes
            args.json.write_text(json.dumps({"environment": environment(), **row}, indent=2) + "\n")


if __name__ == "__main__":
    main()
