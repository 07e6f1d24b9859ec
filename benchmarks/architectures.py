"""Which models of `transformers` a captured step equals eager on: the tiny ones of ``tests/capture/architectures.py``.

Each is trained for three steps from the same weights and random state, eagerly and captured (fp32, AdamW, clipping):

- ``exact``, ``exact_accumulated``: with ``passes="exact"``, a whole batch or two microbatches a step. True if losses,
  norms, parameters, buffers and the optimizer's state are bitwise equal; else the first that is not, or the refusal.
- ``loss_difference``: the largest relative difference of a loss under passes that may round differently. On a GPU the
  default ones. On a CPU, where Inductor would compile for minutes, ``StepOptions(norm="kernel", inductor="off")``: the
  plain-torch forms of our operators.

Writes ``architectures.json`` next to this file, with the environment; with names, only their rows are measured again,
so each row names its commit.

    python benchmarks/architectures.py [NAME ...] [--device cuda] [--json FILE]
"""

import argparse
import copy
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the table lives with its tests

import stepgraph
from stepgraph.config.environment import environment
from tests.capture.architectures import ARCHITECTURES, Architecture, loss_fn
from tests.capture.conftest import eager_step

STEPS = 3


class Pair:
    """A model and its twin, the batches, and an optimizer for each."""

    def __init__(self, row: Architecture, device: torch.device):
        torch.manual_seed(0)
        self.model = row.build().to(device)
        self.twin = copy.deepcopy(self.model)
        self.batches = [{key: moved(value, device) for key, value in row.batch().items()} for _ in range(2)]
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-3, fused=device.type == "cuda") for m in (self.model, self.twin)
        ]

    def captured(self, passes: Any, accumulate: int = 1) -> stepgraph.CapturedStep:
        return stepgraph.capture(
            *(self.twin, loss_fn, self.batches[0], self.optimizers[1]),
            **{"max_grad_norm": 1.0, "accumulate": accumulate, "passes": passes},
        )

    def losses(self, step: stepgraph.CapturedStep) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(eager's loss, the captured step's) of each step, from equal random state; their norms follow them."""
        found = []
        for i in range(STEPS):
            batch = self.batches[i % 2]
            torch.manual_seed(i)
            expected = eager_step(self.model, loss_fn, batch, self.optimizers[0], 1.0, step.spec.accumulate)
            torch.manual_seed(i)
            found += [(expected[0], step(batch)), (expected[1], step.metrics["grad_norm"])]
        return found

    def first_difference(self) -> str | None:
        """The name of the first tensor of the model or its optimizer that is not bitwise equal to its twin's."""
        for (name, a), b in zip(self.model.state_dict().items(), self.twin.state_dict().values(), strict=True):
            if not torch.equal(a, b):
                return name
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        for key, state in states[0].items():
            for name, value in state.items():
                if not torch.equal(value, states[1][key][name]):
                    return f"{name} of parameter {key}"
        return None if states[0].keys() == states[1].keys() else "the optimizer's parameters"


def moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def line_of(error: Exception) -> str:
    """Its first line, with paths as packages know them."""
    return re.sub(r"\S*site-packages/", "", str(error).splitlines()[0])


def exact(row: Architecture, device: torch.device, accumulate: int) -> bool | str:
    pair = Pair(row, device)
    try:
        results = pair.losses(pair.captured("exact", accumulate))
    except (stepgraph.CaptureError, RuntimeError) as error:
        return line_of(error)
    if not all(torch.equal(a, b) for a, b in results):
        return "loss or gradient norm"
    return pair.first_difference() or True


def close(row: Architecture, device: torch.device) -> dict[str, Any]:
    pair = Pair(row, device)
    on_cpu = device.type == "cpu"
    try:
        step = pair.captured(stepgraph.StepOptions(norm="kernel", inductor="off") if on_cpu else "default")
        differences = [((a - b).abs() / a.abs()).item() for a, b in pair.losses(step)[::2]]
    except (stepgraph.CaptureError, RuntimeError) as error:
        return {"loss_difference": line_of(error)}
    return {
        "loss_difference": max(differences),
        "nodes": len(step.graph.graph.nodes),
        "capture_s": round(step.graph.capture_s, 3),
        "passes_s": round(sum(report.apply_s for report in step.report), 3),
    }


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="rows of the table (default: all)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows, about = [], environment()
    for row in ARCHITECTURES:
        if args.names and row.name not in args.names:
            continue
        found = {"name": row.name, "kind": row.kind, "model": row.model, "parameters": parameters(row.build())}
        found |= {"exact": exact(row, args.device, 1), "exact_accumulated": exact(row, args.device, 2)}
        rows.append(found | close(row, args.device) | {"commit": about["git"] and about["git"]["commit"][:7]})
        print(json.dumps(rows[-1]), flush=True)
    if args.names and args.json.exists():
        new = {row["name"]: row for row in rows}
        rows = [new.get(row["name"], row) for row in json.loads(args.json.read_text())["models"]]
    record = {"transformers": transformers.__version__, "steps": STEPS, "device": str(args.device), "models": rows}
    args.json.write_text(json.dumps(record | {"environment": about}, indent=1) + "\n")
    equal = sum(row["exact"] is True and row["exact_accumulated"] is True for row in rows)
    print(f"{equal} of {len(rows)} bitwise equal to eager; written to {args.json}")


if __name__ == "__main__":
    main()
