"""Two runs of `make train`, of a commit that shuffled documents and of one that shuffles rows: what was the loss?

git archive COMMIT | tar x -C FOLDER      # and there: python -m stepgraph train llama3-debug --out RUN
python benchmarks/curve.py COMMIT=RUN COMMIT=RUN [--json FILE] [--png FILE]
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stepgraph.config.environment import environment
from stepgraph.train.records.folder import read_metrics
from stepgraph.train.records.plot import running_mean

NAMES = ("documents shuffled", "rows shuffled")
COLORS = ("#d1495b", "#2f6fb5")


def curve(run: Path) -> dict[str, Any]:
    """The losses of a run; ``second_half``: how far those of its steps' batches lie apart there."""
    records = read_metrics(run / "metrics.jsonl")
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    half = losses[len(losses) // 2 :]
    return {
        "loss": losses,
        "val_loss": {record["step"]: record["val_loss"] for record in records if "val_loss" in record},
        "second_half": {"least": min(half), "most": max(half), "deviation": statistics.pstdev(half)},
    }


def draw(curves: list[dict[str, Any]], png: Path) -> None:
    """Both curves, one beside the other on one scale."""
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, one, name, color in zip(figure.subplots(1, 2, sharey=True), curves, NAMES, COLORS, strict=True):
        steps = range(1, len(one["loss"]) + 1)
        axes.plot(steps, one["loss"], color=color, alpha=0.45, linewidth=0.9, label="training, each step")
        axes.plot(steps, running_mean(one["loss"]), color=color, linewidth=2, label="training, running mean")
        axes.plot(one["val_loss"].keys(), one["val_loss"].values(), "o", color="#1f2933", label="validation")
        last = list(one["val_loss"].values())[-1]
        axes.set_title(f"{name}: validation {last:.3f}", loc="left", fontsize=11)
        axes.set_ylim(1.5, 4.6)
        axes.set_xlabel("step")
        axes.grid(color="#e4e7eb", linewidth=0.8)
        axes.legend(frameon=False)
    figure.axes[0].set_ylabel("cross-entropy (nats per token)")
    figure.savefig(png)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, metavar="COMMIT=RUN")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    commits, runs = zip(*(word.split("=", 1) for word in options.runs), strict=True)
    curves = [curve(Path(run)) for run in runs]
    for name, one in zip(NAMES, curves, strict=True):
        print(f"{name}: {one['second_half']}, validation {one['val_loss']}")
    if options.json:
        rows = [{"order": n, "commit": c} | one for n, c, one in zip(NAMES, commits, curves, strict=True)]
        options.json.write_text(json.dumps({"environment": environment(), "runs": rows}, indent=1) + "\n")
    if options.png:
        draw(curves, options.png)


if __name__ == "__main__":
    main()
