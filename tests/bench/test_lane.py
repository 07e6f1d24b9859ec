"""A provider's process as its parent sees it: answers, what goes wrong, and the time limit."""

import sys

import pytest

from stepgraph.bench.lane import Lane, rotated
from stepgraph.bench.rows import Row

#: Echoes its requests, but sleeps, fails or ends where one says so.
CHILD = """
import os, time
from stepgraph.bench.lane import requests, take_job
job, answer = take_job()
print("noise on stdout")
answer({"job": job})
for request in requests():
    if request["do"] == "sleep":
        time.sleep(1000)
    if request["do"] == "fail":
        raise ValueError("one line\\nand another")
    if request["do"] == "end":
        os._exit(3)
    answer(request)
"""


@pytest.fixture
def lane():
    row = Row(model="m", provider="p")
    with Lane(row, [sys.executable, "-c", CHILD.replace("\\\\", "\\")]) as lane:
        assert lane.ask({"name": "x"}) == {"job": {"name": "x"}}
        yield lane


def test_it_answers_and_ends(lane):
    process = lane.process
    assert lane.ask({"do": "echo", "number": 2}) == {"do": "echo", "number": 2}
    lane.close()
    assert process.returncode == 0 and lane.row.error is None


@pytest.mark.parametrize(
    ("do", "error"), [("fail", "ValueError: one line and another"), ("end", "its process ended with 3")]
)
def test_a_failure_is_the_rows_error(lane, do, error):
    assert lane.ask({"do": do}) == {} and lane.row.error == error
    assert lane.ask({"do": "echo"}) == {}  # nothing is asked any more


def test_what_takes_too_long_is_ended(lane):
    lane.limit_s, process = 0.5, lane.process
    assert lane.ask({"do": "sleep"}) == {} and lane.row.error.startswith("not done after 0.5 s: ")
    assert process.returncode is not None  # it was to sleep for longer than a test may take


def test_rotated():
    assert rotated("abc", 4) == ["b", "c", "a"]
