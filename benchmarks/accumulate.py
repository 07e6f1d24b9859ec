"""What a step of n microbatches costs before it runs: seconds of capture and of the exact passes, and nodes.

Accumulation is a schedule over the graphs of one microbatch and of the update, so none of these grows with n. On a CPU,
``llama3-debug`` with sequences of 64. Seconds are those that this process spent on a processor.

    python benchmarks/accumulate.py [--json FILE] [N ...]      # N: 1 4 16 64
"""

import argparse
import gc
import json
import time
from pathlib import Path

import torch

from stepgraph.capture import trace_step
from stepgraph.config.environment import environment
from stepgraph.models import Llama3, llama3_debug, next_token_loss
from stepgraph.passes import run_passes


def measure(n: int) -> dict[str, float | int]:
    """The row of ``n`` microbatches of two sequences."""
    model = Llama3(llama3_debug())
    ids = torch.zeros(2 * n, 64, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gc.collect()
    start = time.process_time()
    traced = trace_step(
        model, next_token_loss, {"tokens": ids, "targets": ids}, optimizer, max_grad_norm=1.0, accumulate=n
    )
    captured = time.process_time()
    # Before accumulation was a schedule, a capture had one graph.
    graphs = list(traced.program.graphs.values()) if hasattr(traced, "program") else [traced.step]
    for graph in graphs:
        run_passes(graph, "exact")
    passed = time.process_time()
    nodes = sum(1 for graph in graphs for _ in graph.nodes())
    return {"microbatches": n, "capture_s": captured - start, "passes_s": passed - captured, "nodes": nodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measure(1)  # imports and caches
    rows = []
    for n in options.counts:
        rows.append(measure(n))
        print(
            "{microbatches:3d}: capture {capture_s:6.2f} s, passes {passes_s:6.2f} s, {nodes:,} nodes".format(
                **rows[-1]
            )
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
