"""What the host does in an eager call of a norm, microseconds: functions and modules, ours next to torch's.

    PYTHONPATH=. python benchmarks/norm_host.py [--json FILE] [--rows 4096] [--width 1024]

Each call records its graph, as in training; backward is ``torch.autograd.grad`` for x and all parameters. Providers
take turns, a hundred calls each, on an idle GPU: the host's time until the call returns, and the median over rounds.
On a CPU the kernels' time is in the figures. The last column is ours less torch's (asked: at most 1 forward).
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph import kernels
from stepgraph.config.environment import environment

ROUNDS, CALLS = 15, 100
EPS = 1e-6


def calls(rows: int, width: int, device: str) -> dict[str, tuple[Callable, Callable]]:
    """By name: ours and torch's call, each without arguments."""
    made = {"dtype": torch.bfloat16, "device": device}
    x, weight, bias = (torch.randn(*shape, **made).requires_grad_() for shape in ((rows, width), (width,), (width,)))
    dy = torch.randn(rows, width, **made)
    forwards: dict[str, tuple[tuple[Callable, list], tuple[Callable, list]]] = {
        "rms_norm": (
            (lambda: kernels.rms_norm(x, weight, eps=EPS), [weight]),
            (lambda: F.rms_norm(x, (width,), weight, EPS), [weight]),
        ),
        "layer_norm": (
            (lambda: kernels.layer_norm(x, weight, bias, eps=EPS), [weight, bias]),
            (lambda: F.layer_norm(x, (width,), weight, bias, EPS), [weight, bias]),
        ),
    }
    for name in ("RMSNorm", "LayerNorm"):
        pair = [getattr(of, name)(width, EPS, **made) for of in (kernels, nn)]
        forwards[name] = tuple((lambda norm=norm: norm(x), list(norm.parameters())) for norm in pair)

    def both(forward: Callable, parameters: list) -> Callable:
        return lambda: torch.autograd.grad(forward(), (x, *parameters), dy)

    found = {f"{name} forward": tuple(f for f, _ in pair) for name, pair in forwards.items()}
    return found | {f"{name} forward + backward": tuple(both(*one) for one in pair) for name, pair in forwards.items()}


def host_us(call: Callable, device: str) -> float:
    """Median of some calls; the GPU has nothing queued before them."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    if device == "cuda":
        torch.cuda.synchronize()
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs = calls(options.rows, options.width, device)
    times = {name: ([], []) for name in pairs}
    for round_ in range(ROUNDS + 1):  # the first compiles
        for name, pair in pairs.items():
            for call, into in zip(pair, times[name], strict=True):
                us = host_us(call, device)
                if round_:
                    into.append(us)
    rows = {name: [round(median(part), 2) for part in both] for name, both in times.items()}
    print(f"{options.rows} x {options.width} bf16, {device}: host us of a call, stepgraph, torch, difference")
    for name, (ours, theirs) in rows.items():
        print(f"{name:32s} {ours:8.1f} {theirs:8.1f} {ours - theirs:+8.1f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"environment": environment(), "settings": vars(options), "us": rows}, file, indent=1)


if __name__ == "__main__":
    main()
