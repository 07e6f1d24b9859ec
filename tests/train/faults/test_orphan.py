"""A rank whose launcher is gone ends, even if nobody reads its output."""

import os
import subprocess
import sys

import pytest

ORPHAN = """
import os
from stepgraph.train import launch
os.environ["RANK"] = "x" * int(os.environ["MANY"])
launch._wait_for_end(-1)  # no process: the launcher is gone
"""


@pytest.mark.parametrize("many", [1, 1 << 20], ids=["nobody reads", "the reader has stopped"])
def test_an_orphan_ends_where_its_last_words_cannot_leave(many):
    read, write = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", ORPHAN], stderr=write, env=os.environ | {"MANY": str(many)})
    os.close(write)
    if many == 1:
        os.close(read)
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
        if many > 1:
            os.close(read)
