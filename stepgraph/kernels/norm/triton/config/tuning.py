"""Optional autotuning: times configurations near the one that `select` takes, and keeps the fastest on disk.

Off by default: the rules take no time and give the same configuration on every machine with the same GPU. Inside
``with autotune():`` the first call of every problem (kind, shape, dtypes) tries a few neighbours, each compiled in
about a second. The fastest is kept in ``norms-<gpu>-triton-<version>.json`` under ``$STEPGRAPH_CACHE``, or
``~/.cache/stepgraph``, and is used without timing from then on. Another configuration may add sums over rows in another
order: results are bitwise reproducible as long as that file stays.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stepgraph.cache import named_cache
from stepgraph.kernels.norm.triton.config.limits import Config, Hardware, Problem, fits
from stepgraph.kernels.norm.triton.config.rules import preferences
from stepgraph.kernels.norm.triton.config.select import select

#: How many of `preferences` are varied, and how often each configuration is timed.
STARTS, REPEATS = 3, 7

_enabled = False
_found: dict[Path | None, dict[str, Config]] = {}
_on_change: list[Callable[[], None]] = []


def on_change(call: Callable[[], None]) -> None:
    """``call`` whenever tuning is turned on or off: earlier plans may then be stale."""
    _on_change.append(call)


@contextlib.contextmanager
def autotune() -> Iterator[None]:
    """Inside, norms on a GPU run with the fastest configuration tried; outside, with that of the rules."""
    global _enabled
    before, _enabled = _enabled, True
    for call in _on_change:
        call()
    try:
        yield
    finally:
        _enabled = before
        for call in _on_change:
            call()


def neighbours(problem: Problem, hw: Hardware) -> list[Config]:
    """The rules' configuration first, then others that fit: half and twice the rows and programs, each finish."""
    first = select(problem, hw)
    found = {first: None}
    for start in [config for config in preferences(problem, hw) if fits(problem, config, hw)][:STARTS]:
        for rows in (start.rows, start.rows * 2, start.rows // 2):
            for programs in (start.programs, start.programs * 2, start.programs // 2):
                for finish in ("grid", "launch") if problem.sums else (start.finish,):
                    config = replace(start, rows=rows, programs=programs, finish=finish)
                    same_loop = bool(programs) == bool(start.programs)
                    if rows and same_loop and fits(problem, config, hw):
                        found[config] = None
    return list(found)


def choose(problem: Problem, hw: Hardware, run: Callable[[Config], Any]) -> Config:
    """The configuration of a call that ``run`` makes: from the rules, or tuned. Never timed in a CUDA graph capture."""
    if not _enabled:
        return select(problem, hw)
    file = _file()
    found = _load(file)
    name = "-".join(str(field) for field in problem).replace(" ", "")
    if name not in found:
        if torch.cuda.is_current_stream_capturing():
            return select(problem, hw)
        found[name] = fastest(neighbours(problem, hw), run)
        if file is not None:
            _save(file, found)
    return found[name]


def fastest(configs: list[Config], run: Callable[[Config], Any]) -> Config:
    """The config with which ``run`` takes least time; the first of equals."""
    return min(configs, key=lambda config: _milliseconds(run, config))


def _milliseconds(run: Callable[[Config], Any], config: Config) -> float:
    """Median time of a call whose inputs are not in the L2 cache."""
    run(config)
    flush = torch.empty(torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(config)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def _file() -> Path | None:
    """Where the results are kept; None where the user wants no cache, and they last as long as this process."""
    import triton

    folder = named_cache()
    if folder is None:
        return None
    gpu = torch.cuda.get_device_name().replace(" ", "-")
    return folder / f"norms-{gpu}-triton-{triton.__version__}.json"


def _load(file: Path | None) -> dict[str, Config]:
    """What ``file`` holds, read once. Raises ValueError for a file that is not one of ours."""
    if file not in _found:
        _found[file] = {}
        if file is not None and file.exists():
            try:
                _found[file] = {name: Config(**config) for name, config in json.loads(file.read_text()).items()}
            except (ValueError, TypeError, AttributeError) as error:
                del _found[file]
                raise ValueError(
                    f"{file} is no record of tuned norms ({error}); allowed is what stepgraph wrote: delete the file"
                ) from error
    return _found[file]


def _save(file: Path, found: dict[str, Config]) -> None:
    """Written aside and renamed whole, with what other processes have written since."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        found = json.loads(file.read_text()) | {name: asdict(config) for name, config in found.items()}
    else:
        found = {name: asdict(config) for name, config in found.items()}
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as aside:
        json.dump(found, aside, indent=1)
    os.replace(aside.name, file)
