"""Providers of a benchmark, each measured in a process of its own with empty compile caches."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from stepgraph.config.environment import environment


def measured_alone(name: str, timeout: float | None = None) -> dict[str, Any]:
    """What this script prints last with its own arguments and ``--child name``, or how that failed."""
    with tempfile.TemporaryDirectory() as cache:
        caches = {k: f"{cache}/{k}" for k in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "STEPGRAPH_CACHE")}
        words = [sys.executable, *sys.argv, "--child", name]
        try:
            child = subprocess.run(
                words, env=os.environ | caches, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True
            )
        except subprocess.TimeoutExpired:
            return {"provider": name, "failed": f"over {timeout} s"}
        except subprocess.CalledProcessError as failure:
            return {"provider": name, "failed": failure.returncode}
    return json.loads(child.stdout.splitlines()[-1])


def measure_each(
    options: argparse.Namespace, measure: Callable[[str, argparse.Namespace], dict[str, Any]],
    names: list[str] | None = None, timeout: float | None = None,
) -> None:  # fmt: skip
    """Print what ``measure`` gives for each of ``names``, by default ``options.providers``, and write it to
    ``options.json`` as it comes. ``options.child``: the one that this process is started for."""
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    record = {"environment": environment(), "options": {k: str(v) for k, v in vars(options).items()}, "providers": []}
    for name in options.providers if names is None else names:
        record["providers"].append(measured_alone(name, timeout))
        print(json.dumps(record["providers"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
