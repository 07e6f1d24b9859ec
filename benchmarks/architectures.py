"""Which models of `transformers` a captured step equals eager on: the tiny ones of ``tests/capture/architectures.py``.

Each is trained for three steps from the same weights and random state, eagerly and captured (AdamW, clipping): with
``passes="exact"``, once a whole batch and once as two microbatches, where all must be bitwise equal (losses, norms,
gradients, parameters, buffers, optimizer state, random state); and with the default passes but Inductor, which would
compile for minutes on a CPU, where losses must be close. Writes ``architectures.json`` beside this file, with the
environment.

    python benchmarks/architectures.py [NAME ...] [--json FILE]
"""

import argparse
import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the table lives with its tests

import stepgraph
from stepgraph.config.environment import environment
from tests.capture.architectures import ARCHITECTURES, Architecture, loss_fn
from tests.capture.conftest import check_training, eager_step

STEPS = 3


def exact(row: Architecture, accumulate: int) -> bool | str:
    """True if everything is bitwise equal; else what differs first, or the line that refuses the model."""
    torch.manual_seed(0)
    model, batches = row.build(), [row.batch() for _ in range(2)]
    try:
        check_training(model, loss_fn, batches, adamw, max_grad_norm=1.0, accumulate=accumulate, steps=STEPS)
    except (AssertionError, stepgraph.CaptureError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return True


def close(row: Architecture) -> dict[str, Any]:
    """The largest relative difference of a loss under the default passes without Inductor, and the capture itself."""
    torch.manual_seed(0)
    model, batches = row.build(), [row.batch() for _ in range(2)]
    twin = copy.deepcopy(model)
    try:
        step = stepgraph.capture(
            twin, loss_fn, batches[0], adamw(twin), max_grad_norm=1.0, passes="default", disable=["inductor"]
        )
        optimizer, differences = adamw(model), []
        for i in range(STEPS):
            torch.manual_seed(i)
            expected, _ = eager_step(model, loss_fn, batches[i % 2], optimizer, max_grad_norm=1.0)
            torch.manual_seed(i)
            differences.append(((step(batches[i % 2]) - expected).abs() / expected.abs()).item())
    except (stepgraph.CaptureError, RuntimeError) as error:
        return {"default_refused": str(error).splitlines()[0]}
    return {
        "default_loss_difference": max(differences),
        "nodes": len(step.graph.graph.nodes),
        "capture_s": round(step.graph.capture_s, 3),
        "passes_s": round(sum(report.apply_s for report in step.report), 3),
    }


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="rows of the table (default: all)")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = []
    for row in ARCHITECTURES:
        if args.names and row.name not in args.names:
            continue
        found = {"name": row.name, "kind": row.kind, "model": row.model, "exact": exact(row, 1)}
        found |= {"exact_accumulated": exact(row, 2)} | close(row)
        rows.append(found)
        print(json.dumps(found), flush=True)
    record = {"transformers": transformers.__version__, "steps": STEPS, "inductor": False, "models": rows}
    args.json.write_text(json.dumps(record | {"environment": environment()}, indent=1) + "\n")
    equal = sum(row["exact"] is True and row["exact_accumulated"] is True for row in rows)
    print(f"{equal} of {len(rows)} bitwise equal to eager; written to {args.json}")


if __name__ == "__main__":
    main()
