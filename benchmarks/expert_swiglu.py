"""SwiGLU of experts' rows in buffers that have room for more, by our kernels and by Inductor's: ms, by graph replay.

    python benchmarks/expert_swiglu.py [--json FILE]
    python benchmarks/expert_swiglu.py --device cpu      # in small, by the references: that it runs, no measurement

``forward`` is ``silu(gate) * up``, ``backward`` both gradients side by side, in bf16. ``ours``: what the pass
`expert_swiglu` puts into a step, for the rows in use, and nothing behind them, as `unread_rows` leaves it; ``zeros``:
the same with zeros there. ``inductor``: ``torch.compile`` of the formula over the whole
buffer, by the rules of a step, as a step has it without the pass. Rows are those of one of two ranks of experts, of
four sequences of 4,096 a rank in two chunks (DeepSeek-V3 16B's record on two H200s), in buffers of ``capacity`` times
the balanced load; ``load``: rows in use over the balanced ones. They go to experts evenly, or (``skewed``) with
probabilities that fall as 1 / (8 + expert). GB/s count the rows in use once, read and written, by whomever: next to the
copy's they say how much of the time those rows need. The results in rows in use must be near plain torch's.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stepgraph.bench.norm.timing import copy_gbps, graph_ms, wall_ms
from stepgraph.config.environment import environment
from stepgraph.inductor import fusion_guard, tuned_reductions
from stepgraph.kernels.moe import swiglu_rows
from stepgraph.kernels.moe.swiglu import backward_reference, reference, swiglu_rows_backward

Tensor = torch.Tensor


class Case(NamedTuple):
    """``balanced``: rows that a rank's experts have in balance; ``width``: of gate, and of up."""

    model: str
    balanced: int
    width: int
    experts: int
    capacity: float
    load: float = 1.0
    skewed: bool = False

    @property
    def rows(self) -> int:
        return round(self.balanced * self.capacity)

    @property
    def used(self) -> int:
        return round(self.balanced * self.load)


CASES = (
    Case("deepseek-v3-16b, ep=2", 6 * 8192, 1408, 32, 2.0),
    Case("deepseek-v3-16b, ep=2", 6 * 8192, 1408, 32, 2.0, 1.5, True),
    Case("deepseek-v3-16b, ep=2", 6 * 8192, 1408, 32, 1.25),
    Case("deepseek-v3-16b, ep=2", 6 * 8192, 1408, 32, 1.0),
    Case("qwen3-30b-a3b, ep=2", 8 * 8192, 768, 64, 2.0),
)
PRODUCTS = ("forward", "backward")


def offsets_of(case: Case, device: torch.device) -> Tensor:
    """(experts,) int32: the end of each expert's rows."""
    share = torch.tensor([1 / (8 + e) if case.skewed else 1.0 for e in range(case.experts)], dtype=torch.float64)
    return (share.cumsum(0) / share.sum() * case.used).round().to(torch.int32).to(device)


def plain_forward(gate_up: Tensor) -> Tensor:
    """The formula over all rows, as the model has it."""
    gate, up = gate_up.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def plain_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Its gradient, as autograd traces it."""
    gate, up = gate_up.chunk(2, 1)
    halves = torch.ops.aten.silu_backward(dy * up, gate), dy * torch.nn.functional.silu(gate)
    return torch.cat(halves, 1)


def by_ours(gate_up: Tensor, dy: Tensor, offsets: Tensor, zero_rest: bool = False) -> dict[str, Callable[[], Tensor]]:
    return {
        "forward": lambda: swiglu_rows(gate_up, offsets, zero_rest),
        "backward": lambda: swiglu_rows_backward(dy, gate_up, offsets, zero_rest),
    }


def by_inductor(gate_up: Tensor, dy: Tensor, offsets: Tensor) -> dict[str, Callable[[], Tensor]]:
    rules = (fusion_guard() | tuned_reductions()).options if gate_up.is_cuda else None
    forward, backward = (torch.compile(f, dynamic=False, options=rules) for f in (plain_forward, plain_backward))
    return {"forward": lambda: forward(gate_up), "backward": lambda: backward(dy, gate_up)}


PROVIDERS: dict[str, Callable[..., dict[str, Callable[[], Tensor]]]] = {
    "ours": by_ours,
    "zeros": partial(by_ours, zero_rest=True),
    "inductor": by_inductor,
}


def bytes_in_use(case: Case, product: str, itemsize: int) -> int:
    """What the rows in use need: gate, up and the result; dy, gate, up and both gradients."""
    return {"forward": 3, "backward": 5}[product] * case.used * case.width * itemsize


def measured(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """A row for each product and provider."""
    torch.manual_seed(0)
    torch.compiler.reset()
    gate_up, dy = (torch.randn(case.rows, n * case.width, device=device).to(dtype) for n in (2, 1))
    offsets = offsets_of(case, device)
    right = {"forward": reference(gate_up, offsets), "backward": backward_reference(dy, gate_up, offsets)}
    found = []
    for provider, make in PROVIDERS.items():
        for product, call in make(gate_up, dy, offsets).items():
            row: dict[str, Any] = case._asdict() | {"product": product, "provider": provider}
            used = slice(case.used)
            # Inductor rounds once where ours and plain torch round twice, of sums of two products.
            torch.testing.assert_close(call()[used], right[product][used], rtol=0.02, atol=0.02)
            row["ms"] = graph_ms([call] * 3, None) if device.type == "cuda" else wall_ms(call)
            row["gbps"] = bytes_in_use(case, product, dtype.itemsize) / row["ms"] / 1e6
            found.append(row)
    return found


def summary(rows: list[dict[str, Any]], copy: float) -> list[str]:
    """A line for each case and product: ours next to Inductor's."""
    lines = []
    for ours in (row for row in rows if row["provider"] == "ours"):
        same = (*Case._fields, "product")
        alike = {r["provider"]: r for r in rows if all(r[key] == ours[key] for key in same)}
        zeros, other = alike["zeros"], alike["inductor"]
        kind = "skewed" if ours["skewed"] else "even"
        lines.append(
            f"{ours['model']}, capacity {ours['capacity']:g}, load {ours['load']:g} {kind}, {ours['product']}: "
            f"ours {ours['ms']:.4g} ms ({ours['gbps']:.0f} GB/s, {ours['gbps'] / copy:.0%} of a copy's), "
            f"with zeros {zeros['ms']:.4g} ms, "
            f"inductor {other['ms']:.4g} ms ({other['gbps']:.0f} GB/s), {other['ms'] / ours['ms']:.2f} times as fast"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    copy = copy_gbps(device)
    record: dict[str, Any] = {"environment": environment(), "copy_gbps": copy, "rows": []}
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    print(f"a copy: {copy:.0f} GB/s", flush=True)
    with torch.cuda.stream(stream):
        for case in CASES:
            found = measured(case if stream is not None else case._replace(balanced=64, width=24), device)
            record["rows"] += found
            print(*summary(found, copy), sep="\n", flush=True)
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
