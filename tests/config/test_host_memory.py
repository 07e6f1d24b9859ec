"""Freed memory stays with the process: later steps take no page faults."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from stepgraph.config.device import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def step():
    for megabytes in (40, 70, 3, 100):
        torch.ones(megabytes << 18)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
taken = []
for _ in range(9):
    before = faults()
    step()
    taken.append(faults() - before)
print(sorted(taken)[4])  # the median: a block of another thread may split the heap once, and one step grows it
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is on Linux")
def test_steps_take_no_page_faults():
    without, kept = faults("default"), faults("keep")
    assert without > 1000 and kept < 100, (without, kept)
