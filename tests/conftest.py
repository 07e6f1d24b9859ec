"""What all tests share: caches of their own, so that no run reads or writes the user's, and a check that a test module
leaves torch's global settings as it found them."""

import os
import tempfile

import pytest

os.environ["STEPGRAPH_CACHE"] = "off"  # no test finds a step that another saved; ranks and commands inherit it
# Inductor trusts that the C++ compiler takes what the processor has: each process would start ten others to try it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder of the process that starts them
    _CACHES = tempfile.TemporaryDirectory(prefix="stepgraph-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHES.name


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
