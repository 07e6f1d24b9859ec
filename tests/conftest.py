"""What all tests share: caches of their own, so that no run reads or writes the user's, and a check that a test module
leaves torch's global settings as it found them."""

import gc
import os
import random
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

os.environ["STEPGRAPH_CACHE"] = "off"  # no test finds a step that another saved; ranks and commands inherit it
# Inductor trusts that the C++ compiler takes what the processor has: each process would start ten others to try it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder of the process that starts them
    _CACHES = tempfile.TemporaryDirectory(prefix="stepgraph-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHES.name


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Python's collector leaves alone what is imported here and looks for cycles seldom: else a fifth of the time to
    import and a twelfth of the tests' goes to it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze(), gc.set_threshold(20_000), gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with several parameters, CI runs as many combinations as it takes to meet each value of each parameter,
    always the same; the others are ``long``."""
    combined = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and "gpu" not in item.path.parts and not item.get_closest_marker("long"):
            combined[item.nodeid.partition("[")[0]].append(item)
    for name, cases in combined.items():
        met: set[tuple[int, str]] = set()
        for item in random.Random(Path(name).name).sample(cases, len(cases)):
            values = set(enumerate(item.callspec._idlist))
            if values <= met:
                item.add_marker(pytest.mark.long)
            met |= values


def torch_settings() -> dict[str, object]:
    """torch's settings that change what a later test computes, compiles or prints, by name."""
    import torch
    from torch._inductor import config

    return {
        "inductor's config": config.get_config_copy(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(scope="session", autouse=True)
def no_lines_for_who_waits():
    """They would come on a busy machine alone, between the lines that a test expects."""
    from stepgraph.bench import lane
    from stepgraph.passes import waiting

    waiting.EVERY_S = lane.SPEAKS_EVERY_S = 3600.0


def seed(name: str) -> None:
    """Draw the same numbers from here on in every run and on every worker: what fails in CI fails here too."""
    import numpy
    import torch

    number = zlib.crc32(name.encode())
    random.seed(number), numpy.random.seed(number), torch.manual_seed(number)


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest) -> None:
    seed(request.node.name)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Before a module of tests is imported, which may draw numbers."""
    if isinstance(collector, pytest.Module):
        seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> None:
    """Before what several tests share is made."""
    if fixturedef.scope != "function":
        seed(f"{fixturedef.baseid} {fixturedef.argname}")


@pytest.fixture(scope="module", autouse=True)
def same_torch_settings():
    """A module that leaves another setting fails here: a module after it in the same process would fail instead, and
    only in the order that the workers happened to take."""
    before = torch_settings()
    yield
    after = torch_settings()
    options, changed = before.pop("inductor's config"), after.pop("inductor's config")
    assert after == before
    assert {name: value for name, value in changed.items() if options[name] != value} == {}
