"""Runs the test suite on a given torch and keeps the outcome in ``benchmarks/versions.json``. Needs only Python.

python tests/versions.py --torch 2.15.0                    # in ~/.cache/stepgraph/torch-2.15.0, made if need be
python tests/versions.py --torch 2.15.0 --venv DIR         # in a virtual environment of your own
python tests/versions.py --python PYTHON -- tests/gpu -n 1 # with an interpreter that has all it needs; pytest options
python tests/versions.py --table                           # the record as a table in Markdown
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "versions.json"
KEEP = ("torch", "cuda", "triton", "transformers", "python")

#: Runs in the interpreter under test: the environment of a run, as every record has it.
ENVIRONMENT = """
import importlib.metadata, json
from stepgraph.config.environment import environment
found = environment()
found["versions"]["transformers"] = importlib.metadata.version("transformers")
print(json.dumps(found))
"""


def main() -> int:
    """Runs what the command line asks for; the exit status is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="VERSION", help="the torch to install")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="where to install it")
    parser.add_argument("--python", metavar="PYTHON", help="run with this interpreter, and install nothing")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help="where the outcome is kept")
    parser.add_argument("--table", action="store_true", help="print the record, and run nothing")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after --; without any, what CI runs")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.record.read_text())))
        return 0
    if bool(options.torch) == bool(options.python):
        parser.error("give either --torch VERSION or --python PYTHON, --torch 2.15.0 for example")
    python = options.python
    if options.torch:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        python = prepare(options.venv or cache / "stepgraph" / f"torch-{options.torch}", options.torch)
    environment = json.loads(subprocess.check_output([python, "-W", "ignore", "-c", ENVIRONMENT], cwd=ROOT))
    arguments = options.pytest or ["-n", str(environment["cpu_count"]), "--dist", "worksteal", "-m", "not long"]
    status, outcome = run(python, arguments)
    if outcome is None:
        return status
    keep(options.record, {"environment": environment, "arguments": arguments, **outcome})
    print(table(json.loads(options.record.read_text())))
    return status


def prepare(folder: Path, torch: str) -> str:
    """The interpreter of the virtual environment ``folder``, with ``torch``, this checkout and what its tests need."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    print(f"torch {torch} in {folder}", flush=True)
    # The interpreter of triton 3.6, which torch 2.11 brings, turns arrays of one element into numbers: not numpy 2.4.
    numpy = "numpy<2.4" if torch.startswith("2.11.") else "numpy"
    wanted = [f"torch=={torch}", numpy, "-e", ".[test]"]
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    subprocess.run([python, *install], cwd=ROOT, check=True)
    return str(python)


def run(python: str, arguments: list[str]) -> tuple[int, dict[str, Any] | None]:
    """(pytest's exit status, what it counted; None if it ended before it wrote its report)."""
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        # One thread per test process: the processes share the cores.
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
        if not report.exists():
            return status, None
        return status, counted(report.read_text()) | {"minutes": round((time.time() - begin) / 60, 1)}


def counted(report: str) -> dict[str, Any]:
    """How many tests of a JUnit ``report`` passed, failed and were skipped, and the names of those that failed."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            counts["failures"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def keep(record: Path, row: dict[str, Any]) -> None:
    """Writes ``row`` to ``record``, in place of an earlier one of the same versions, devices and arguments."""

    def same(row: dict[str, Any]) -> list[Any]:
        environment = row["environment"]
        return [[environment["versions"][name] for name in KEEP], environment["gpus"], row["arguments"]]

    rows = json.loads(record.read_text())["rows"] if record.exists() else []
    rows = [*(old for old in rows if same(old) != same(row)), row]
    rows.sort(key=lambda row: [int(part) for part in row["environment"]["versions"]["torch"].split("+")[0].split(".")])
    record.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def table(record: dict[str, Any]) -> str:
    """``record`` in Markdown: a row for each run."""
    lines = ["| torch | triton | transformers | on | passed | failed | skipped |", "|---|---|---|---|--:|--:|--:|"]
    for row in record["rows"]:
        environment, versions = row["environment"], row["environment"]["versions"]
        gpus = environment["gpus"]
        device = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
        cells = [versions["torch"], versions["triton"], versions["transformers"], device]
        lines.append(
            "| " + " | ".join([*map(str, cells), *(str(row[k]) for k in ("passed", "failed", "skipped"))]) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
