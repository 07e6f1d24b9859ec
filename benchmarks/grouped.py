"""Products of all experts' rows, by our operators, torch's and QuACK's: TFLOP/s, by graph replay, in bf16.

    python benchmarks/grouped.py [--json FILE]

``forward`` multiplies rows with their expert's matrix, ``input`` the gradients with its transpose, ``weight`` sums rows
times gradients for each expert. ``torch``: ``torch.nn.functional.grouped_mm``, which ours calls, and zeroes the rows
that no expert has. ``quack``: ``quack.gemm_interface.gemm`` by its default tiles, where it is installed. Rows go to
experts evenly, or (``skewed``) with probabilities that fall as 1 / (8 + expert), in numbers that are multiples of 8.
The results must be near torch's.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.bench.norm.timing import graph_ms
from stepgraph.config.environment import environment
from stepgraph.kernels.moe import grouped_mm
from stepgraph.kernels.moe.grouped import grouped_mm_weight

#: Rows of four sequences of 4,096 with as many experts as each token has; D, F and experts of a layer's gate or up.
SHAPES = {
    "deepseek-v3-16b": (6 * 16384, 2048, 1408, 64),
    "deepseek-v3-16b, ep=2": (6 * 16384, 2048, 1408, 32),
    "qwen3-30b-a3b": (8 * 16384, 2048, 768, 128),
    "deepseek-v3-671b, ep=64": (8 * 16384, 7168, 2048, 4),
}


def offsets_of(rows: int, experts: int, skewed: bool) -> torch.Tensor:
    """(experts,) int32: the end of each expert's rows."""
    share = torch.tensor([1 / (8 + e) if skewed else 1.0 for e in range(experts)], dtype=torch.float64)
    ends = (share.cumsum(0) / share.sum() * rows / 8).round() * 8
    return ends.to(torch.int32).cuda()


def by_torch(rows: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor) -> dict[str, Any]:
    return {
        "forward": lambda: F.grouped_mm(rows, weight, offs=offsets),
        "input": lambda: F.grouped_mm(dy, weight.mT, offs=offsets),
        "weight": lambda: F.grouped_mm(rows.t(), dy, offs=offsets),
    }


def by_ours(rows: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor) -> dict[str, Any]:
    return {
        "forward": lambda: grouped_mm(rows, weight, offsets),
        "input": lambda: grouped_mm(dy, weight.mT, offsets),
        "weight": lambda: grouped_mm_weight(rows, dy, offsets),
    }


def by_quack(rows: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor) -> dict[str, Any]:
    from quack.gemm_interface import gemm

    starts = F.pad(offsets, (1, 0))
    return {
        "forward": lambda: gemm(rows, weight, cu_seqlens_m=starts, tuned=False),
        "input": lambda: gemm(dy, weight.mT, cu_seqlens_m=starts, tuned=False),
        "weight": lambda: gemm(rows.t(), dy, cu_seqlens_k=starts, tuned=False),
    }


PROVIDERS: dict[str, Callable[..., dict[str, Any]]] = {"torch": by_torch, "ours": by_ours, "quack": by_quack}


def measured(name: str, skewed: bool) -> list[dict[str, Any]]:
    """A row for each product and provider."""
    R, D, width, experts = SHAPES[name]
    torch.manual_seed(0)
    rows, dy = (torch.randn(R, n, device="cuda").to(torch.bfloat16) for n in (D, width))
    weight = (torch.randn(experts, width, D, device="cuda") / D**0.5).to(torch.bfloat16).mT  # as parameters lie
    offsets = offsets_of(R, experts, skewed)
    found, right = [], {}
    for provider, make in PROVIDERS.items():
        try:
            calls = make(rows, weight, dy, offsets)
        except ImportError:
            continue
        for product, call in calls.items():
            row = {"model": name, "skewed": skewed, "product": product, "provider": provider}
            found.append(row)
            try:
                result = call()
                right.setdefault(product, result)
                torch.testing.assert_close(result, right[product], rtol=0.02, atol=0.02 * math.sqrt(R / experts))
                row["ms"] = graph_ms([call] * 3, None)
                row["tflops"] = 2 * R * D * width / row["ms"] / 1e9
            except Exception as error:  # another package's code may raise anything
                row["error"] = str(error).strip().splitlines()[0][:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(), "shapes": SHAPES, "rows": []}
    with torch.cuda.stream(torch.cuda.Stream()):
        for name in SHAPES:
            for skewed in (False, True):
                found = measured(name, skewed)
                record["rows"] += found
                for row in found:
                    figure = f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else row["error"]
                    kind = "skewed" if skewed else "even"
                    print(f"{name}, {kind}, {row['product']}, {row['provider']}: {figure}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
