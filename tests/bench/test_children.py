"""Providers of a benchmark in processes of their own: a row of one that ends well, fails, or takes too long."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "children.py"
SCRIPT = """
import subprocess, sys, time
name = sys.argv[sys.argv.index("--child") + 1]
print("noise")
if name != "fails":
    print('{"steps": 1}', flush=True)
if name == "hangs":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])  # holds stderr
    time.sleep(1e6)
if name == "fails":
    sys.stderr.write("Traceback\\nValueError: 3 is too many\\nmore\\n")
    sys.exit(1)
print('{"steps": 2}')
"""


@pytest.fixture
def children(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("children", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    monkeypatch.setattr(module, "environment", dict)
    return module


def test_a_failure_does_not_end_the_others(children, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    children.add_options(parser, ("fails", "ends", "left out"), 2, 100)
    options = parser.parse_args(["--json", str(tmp_path / "found.json")])
    children.measure_each(options, None)
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["environment"]["packages"].keys() == set(children.PACKAGES)
    first, second = record["providers"]
    assert (first["provider"], first["failed"], "steps" in first) == ("fails", "ValueError: 3 is too many", False)
    assert (second["provider"], second["steps"], "failed" in second) == ("ends", 2, False)
    said = capsys.readouterr()
    assert "fails | ValueError: 3 is too many" in said.err and len(said.out.splitlines()) == 2


def test_a_provider_that_takes_too_long_keeps_what_it_reported(children):
    row = children.measured_alone("hangs", 2.0)
    assert row["failed"] == "ended after 2 s" and row.get("steps", 1) == 1
    assert children.measured_alone("ends", 0.0) == {"provider": "ends", "failed": "not started: --within-s is over"}
