"""The environment that a run or a benchmark was measured in: versions, devices, and the state of the source.

It names no host, no user and no path of the machine, so it can be published as it is.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import stepgraph


def package_versions() -> dict[str, str | None]:
    """Versions of ``stepgraph``, ``torch``, ``triton`` (None where it is not installed) and ``python``."""
    return {
        "stepgraph": stepgraph.__version__,
        "torch": package_version("torch"),
        "triton": package_version("triton"),
        "python": platform.python_version(),
    }


def environment() -> dict[str, Any]:
    """The environment of this process, ready for JSON. ``cpu_count``: logical CPUs it may use; ``git``: ``commit`` and
    ``dirty`` (true: files differ from it) of the checkout that stepgraph runs from, or None."""
    import torch  # not above: `stepgraph --version` does not wait for it

    cuda = torch.cuda.is_available()
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if cuda else None}
    return {
        "versions": package_versions() | versions,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "git": git_state(Path(__file__).resolve().parents[2]),
    }


def git_state(checkout: Path) -> dict[str, Any] | None:
    """``{"commit": hash, "dirty": bool}`` of the git work tree whose root is ``checkout``, else None."""
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return None

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([git, "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)

    commit, status = ask("rev-parse", "HEAD"), ask("status", "--porcelain")
    if commit.returncode or status.returncode:  # no commit yet, or a checkout of another user
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


def package_version(package: str) -> str | None:
    """The installed version of ``package``, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
