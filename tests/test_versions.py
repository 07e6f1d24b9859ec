"""The script that runs the suite on another torch: what it counts, what it keeps and how it prints that."""

import json
import subprocess
import sys

from tests import versions

SUITE = """
import pytest

def test_passes():
    pass

def test_fails():
    assert False

@pytest.fixture
def broken():
    raise RuntimeError

def test_cannot_start(broken):
    pass

@pytest.mark.skip
def test_is_left_out():
    pass

@pytest.mark.xfail(strict=True)
def test_fails_as_known():
    assert False

@pytest.fixture
def breaks_afterwards():
    yield
    raise RuntimeError

def test_fails_at_the_end(breaks_afterwards):
    pass
"""


def row(torch: str, passed: int, gpus: tuple[str, ...] = ()) -> dict:
    kept = {"torch": torch, "cuda": None, "triton": None, "transformers": "5.23.0", "python": "3.11.7"}
    counts = {"passed": passed, "failed": 0, "skipped": 1, "failures": []}
    return {"environment": {"versions": kept, "gpus": list(gpus)}, "arguments": ["-m", "not long"], **counts}


def test_counts_what_pytest_reports(tmp_path):
    (tmp_path / "test_some.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    counted = versions.counted((tmp_path / "report.xml").read_text())
    names = [name.split("::")[-1] for name in counted.pop("failures")]
    assert counted == {"passed": 1, "failed": 3, "skipped": 2}
    assert names == ["test_fails", "test_cannot_start", "test_fails_at_the_end"]


def test_keeps_the_latest_run_of_each_version_and_device(tmp_path):
    record = tmp_path / "versions.json"
    gpu = row("2.11.0+cu130", 30, ("NVIDIA H100 80GB HBM3",))
    for one in (row("2.15.0", 1), gpu, row("2.9.0", 3), row("2.15.0", 2)):
        versions.keep(record, one)
    assert json.loads(record.read_text())["rows"] == [row("2.9.0", 3), gpu, row("2.15.0", 2)]
    lines = versions.table(json.loads(record.read_text())).splitlines()
    assert lines[3] == "| 2.11.0+cu130 | None | 5.23.0 | 1 x NVIDIA H100 80GB HBM3 | 30 | 0 | 1 |"
    assert lines[4] == "| 2.15.0 | None | 5.23.0 | CPU | 2 | 0 | 1 |"


def test_asks_for_one_of_version_and_interpreter():
    done = subprocess.run([sys.executable, versions.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "give either --torch VERSION or --python PYTHON" in done.stderr
