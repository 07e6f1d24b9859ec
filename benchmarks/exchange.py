"""Tokens to their experts and back, by three ways: microseconds of dispatch and of combine, forward.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--json FILE]            # the GPUs of one machine
    torchrun --nproc-per-node 2 benchmarks/exchange.py --device cpu --dim 64    # gloo: that it runs, no measurement

- ``splits``: ``all_to_all_single`` of the rows that exist, whose numbers the host reads in each dispatch.
- ``padded``: ``all_to_all_single`` of equal parts, as ``--expert-exchange collectives`` captures it.
- ``symmetric``: our kernels over symmetric memory, as ``--expert-exchange symmetric`` captures it.

Dispatch takes tokens and their choice, and gives rows sorted by the experts that are here; combine takes their results
and gives each token's weighted sum. All three must give the same bits before any is timed. On GPUs the latter two are
replayed as CUDA graphs, as in a step; the first one cannot be. The slowest rank counts, and the median of its repeats.
torch's ``all_to_all_vdev_2d`` is not among them: it needs NVSHMEM.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from stepgraph.capture import guard as conditions
from stepgraph.config.environment import environment
from stepgraph.kernels.moe import combine_rows, gather_rows, sort_by_expert
from stepgraph.parallel import MeshSpec, started
from stepgraph.parallel.expert_symmetric import SymmetricExchange
from stepgraph.parallel.experts import Capacity, ExpertExchange

REPEATS, CALLS = 7, 20


class Splits:
    """By ``all_to_all_single`` with splits."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks = group, group.size()

    def dispatch(self, x, chosen, n_experts):
        """As the exchanges of `stepgraph.parallel`, with as many rows as there are."""
        here = n_experts // self.ranks
        order, places, counts = sort_by_expert(chosen, n_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        sizes = torch.stack([counts, received]).view(2, self.ranks, here).sum(2).tolist()  # the host waits
        rows = x.new_empty(sum(sizes[1]), x.shape[1])
        dist.all_to_all_single(rows, gather_rows(x, order, places), sizes[1], sizes[0], group=self.group)
        expert = torch.arange(here, device=x.device).repeat(self.ranks)
        expert = expert.repeat_interleave(received.long(), output_size=len(rows))
        by_expert, at, counts = sort_by_expert(expert.view(-1, 1), here)
        return (
            gather_rows(rows, by_expert, at),
            counts.cumsum(0, dtype=torch.int32),
            (order, places, sizes, by_expert, at),
        )

    def combine(self, rows, weights, state):
        """As the exchanges of `stepgraph.parallel`."""
        order, places, sizes, by_expert, at = state
        rows = gather_rows(rows, at.flatten(), by_expert.unsqueeze(1))
        back = rows.new_empty(sum(sizes[0]), rows.shape[1])
        dist.all_to_all_single(back, rows, sizes[0], sizes[1], group=self.group)
        return combine_rows(back, places, weights, order)


def calls_of(exchange, x, chosen, weights, n_experts):
    """{"dispatch", "combine"}: functions without arguments; their results are the tensors to compare."""
    with conditions.collected() as stated:
        rows, ends, state = exchange.dispatch(x, chosen, n_experts)
    for _, level in stated.each():
        if level.item() > 1:
            raise SystemExit(f"the routing needs {level.item():.2f} times the room: give a larger --capacity")
    filled = int(ends[-1])

    def dispatch():
        with conditions.collected():  # the room that a captured step has: the host does not wait
            return exchange.dispatch(x, chosen, n_experts)[0][:filled]

    return {"dispatch": dispatch, "combine": lambda: exchange.combine(rows, weights, state)}


def microseconds(function, device, graph):
    """A call of ``function``, the median of ``REPEATS``; replayed from a CUDA graph where ``graph``."""
    for _ in range(3):
        function()
    if device.type == "cuda" and graph:
        stream, recorded = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(recorded, stream=stream, capture_error_mode="thread_local"):
            function()
        function = recorded.replay
        function()
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    slowest = torch.tensor(median(times), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("dim", 4096), ("experts", 64), ("slots", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--capacity", type=float, default=2.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    with started(MeshSpec.parse(f"fsdp={ranks},ep={ranks}"), options.device) as mesh:
        axes, device = mesh.experts, torch.device(options.device)
        generator = torch.Generator().manual_seed(dist.get_rank())
        scores = torch.rand(options.tokens, options.experts, generator=generator)
        weights, chosen = (t.to(device) for t in scores.topk(options.slots))
        x = torch.randn(options.tokens, options.dim, generator=generator).to(device, torch.bfloat16)
        ways = {
            "splits": Splits(axes.axis("ep").get_group()),
            "padded": ExpertExchange(axes, Capacity(options.capacity)),
            "symmetric": SymmetricExchange(axes, Capacity(options.capacity)),
        }
        calls = {name: calls_of(way, x, chosen, weights, options.experts) for name, way in ways.items()}
        for what in ("dispatch", "combine"):
            first, *others = (calls[name][what]() for name in ways)
            assert all(torch.equal(first, other) for other in others), what
        elsewhere = int((chosen // (options.experts // ranks) != axes.axis("ep").get_local_rank()).sum())
        record = {
            **{key: value for key, value in vars(options).items() if key != "json"},
            "ranks": ranks,
            "mib_sent": elsewhere * options.dim * x.element_size() / 2**20,
            "us": {
                name: {what: microseconds(call, device, name != "splits") for what, call in found.items()}
                for name, found in calls.items()
            },
            "environment": environment(),
        }
        if dist.get_rank() == 0:
            print(f"{ranks} ranks, {record['mib_sent']:.1f} MiB sent by rank 0; us of dispatch and combine:")
            for name, found in record["us"].items():
                print(f"  {name:10} {found['dispatch']:10.1f} {found['combine']:10.1f}")
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
