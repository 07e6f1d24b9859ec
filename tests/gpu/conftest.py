"""Tests that need a CUDA GPU; skipped, visibly, elsewhere."""

import os

# cuBLAS reads this once, when it starts; without it deterministic algorithms are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Each process, ranks too, would start a compiler per core; all together they need more memory than a host has.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, (os.cpu_count() or 2) // int(workers))))

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "/tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    elif "PYTEST_XDIST_WORKER" in os.environ:
        for item in items:
            if item.get_closest_marker("timed"):
                item.add_marker(
                    pytest.mark.skip(reason="compares times: run it without -n (pytest tests/gpu -m timed)")
                )


@pytest.fixture
def deterministic():
    """Deterministic algorithms, without which eager does not repeat itself on a GPU."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
