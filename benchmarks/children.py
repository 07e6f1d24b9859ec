"""Providers of a benchmark, each measured in a process of its own with empty compile caches.

A provider that fails or takes too long gets a row with the reason and what it had reported, and the next one starts.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepgraph.config.environment import environment, package_version

PACKAGES = ("transformers", "peft", "trl", "liger-kernel", "bitsandbytes", "accelerate", "flash-attn-4")
SPEAKS_EVERY_S, REPORTS_EVERY_S = 10.0, 2.0
START = time.perf_counter()


def add_options(parser: argparse.ArgumentParser, providers: Sequence[str], default: int, limit_s: float) -> None:
    """The options that `measure_each` reads. ``default``: as many of the first providers are measured."""
    parser.add_argument("--limit-s", type=float, help=f"end a provider after this many seconds; {limit_s:g}, CPU 1200")
    parser.add_argument("--within-s", type=float, help="end the last provider by then")
    parser.add_argument("--json", type=Path, help="written after each provider")
    parser.add_argument("--providers", nargs="+", default=list(providers[:default]), choices=providers)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.set_defaults(gpu_limit_s=limit_s)


def report(found: dict[str, Any]) -> None:
    """In a provider's process: what it has measured so far, in place of what it reported before."""
    print(json.dumps(found), flush=True)


def steps_reported(losses: list[float], ends: list[float]) -> None:
    """The first step and the number of steps."""
    report({"first_step_s": ends[0], "steps": len(ends), "losses": losses[:6] + losses[-1:]})


def timed_steps(
    run: Callable[[int], float], steps: int, so_far: Callable[[list[float], list[float]], None] = steps_reported
) -> tuple[list[float], list[float]]:
    """(losses, seconds at which each step ended since the process began) of ``run(number)``, which waits for the loss.
    ``so_far`` reports them after the first step and every few seconds, with a line of how far it is."""
    losses, ends, said = [], [], 0.0
    for number in range(steps):
        losses.append(run(number))
        ends.append(time.perf_counter() - START)
        if number == 0 or ends[-1] - said > REPORTS_EVERY_S:
            said = ends[-1]
            print(f"step {number + 1} of {steps}, loss {losses[-1]:.4f}, {said:.1f} s", file=sys.stderr, flush=True)
            so_far(losses, ends)
    return losses, ends


def measured_alone(name: str, limit_s: float) -> dict[str, Any]:
    """What this script reports last with its own arguments and ``--child name``; ``failed``: why it ended early."""
    if limit_s <= 1:
        return {"provider": name, "failed": "not started: --within-s is over"}
    print(f"{name}: starts, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
    begun, tail = time.perf_counter(), collections.deque(maxlen=40)
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as answer:
        caches = {k: f"{cache}/{k}" for k in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "STEPGRAPH_CACHE")}
        child = subprocess.Popen(
            [sys.executable, *sys.argv, "--child", name], env=os.environ | caches, stdout=answer,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        heard = [begun]
        reader = threading.Thread(target=_pass_on, args=(name, child, tail, heard), daemon=True)
        reader.start()
        try:
            why = _wait(name, child, begun + limit_s, heard)
        finally:
            with contextlib.suppress(ProcessLookupError):  # compilers that the provider started end with it
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            reader.join(5)
        answer.seek(0)
        rows = [line for line in answer.read().splitlines() if line.startswith("{")]
    if why is None and child.returncode:
        errors = [line for line in tail if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
        why = (errors or [*tail, f"exit status {child.returncode}"])[-1].strip()[:300]
    found = {"provider": name} | (json.loads(rows[-1]) if rows else {})
    return found | {"total_s": round(time.perf_counter() - begun, 1)} | ({} if why is None else {"failed": why})


def _pass_on(name: str, child: subprocess.Popen, tail: collections.deque, heard: list[float]) -> None:
    for line in child.stderr or ():
        tail.append(line.rstrip())
        heard[0] = time.perf_counter()
        print(f"{name} | {line}", end="", file=sys.stderr, flush=True)


def _wait(name: str, child: subprocess.Popen, end: float, heard: list[float]) -> str | None:
    """Until ``child`` ends, or the reason why it must."""
    begun = time.perf_counter()
    while (left := end - time.perf_counter()) > 0:
        try:
            child.wait(min(left, SPEAKS_EVERY_S))
            return None
        except subprocess.TimeoutExpired:
            if (now := time.perf_counter()) - heard[0] > SPEAKS_EVERY_S:
                print(f"{name}: {now - begun:.0f} s", file=sys.stderr, flush=True)
    return f"ended after {end - begun:.0f} s"


def measure_each(
    options: argparse.Namespace, measure: Callable[[str, argparse.Namespace], dict[str, Any]],
    names: list[str] | None = None,
) -> None:  # fmt: skip
    """Print what ``measure`` gives for each of ``names``, by default ``options.providers``, and write it to
    ``options.json`` as it comes. ``options.child``: the one that this process is started for."""
    if options.child:
        report({"provider": options.child} | measure(options.child, options))
        return
    limit = options.limit_s or (options.gpu_limit_s if options.device == "cuda" else 1200)
    chosen = {k: v if isinstance(v, int | float | list) else str(v) for k, v in vars(options).items() if k != "json"}
    packages = {name: package_version(name) for name in PACKAGES}
    record = {"environment": environment() | {"packages": packages}, "options": chosen, "providers": []}
    for name in options.providers if names is None else names:
        left = limit if options.within_s is None else options.within_s - (time.perf_counter() - START)
        record["providers"].append(measured_alone(name, min(limit, left)))
        print(json.dumps(record["providers"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
