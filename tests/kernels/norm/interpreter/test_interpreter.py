"""Runs the checks of this folder in Triton's interpreter, on a CPU.

In processes of their own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("expression", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_in_the_interpreter(expression):
    pytest.importorskip("triton")
    root = HERE.parents[3]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", expression]
    command += map(str, sorted(HERE.glob("check_*.py")))
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
