"""A provider's process as its parent sees it: answers, what goes wrong, and the time limit."""

import sys
import time

import pytest

from stepgraph.bench.lane import Lane, measured, rotated
from stepgraph.bench.rows import Row
from tests import forked

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
def lane(tmp_path):
    program, row = tmp_path / "child.py", Row(model="m", provider="p")
    program.write_text(CHILD)
    with Lane(row, [forked.python(), str(program)]) as lane:
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
    assert lane.ask({"do": "sleep"}) == {} and lane.row.error == "not finished after 0.5 s"
    assert process.returncode is not None  # it was to sleep for longer than a test may take


#: Says which requests it gets; the model "bad" fails while it is built.
TIMED = """
import json, sys
job = json.loads(sys.stdin.readline())
failed = {"error": "broken"} if job["model"] == "bad" else None
print(json.dumps(failed or {"first_step_s": 1.0, "losses": [2.0]}), flush=True)
for line in sys.stdin:
    print(json.dumps({"step_ms": 3.0} if json.loads(line)["do"] == "round" else {"peak_mem_gib": 4.0}), flush=True)
"""


def test_who_fails_or_comes_too_late_does_not_end_the_run():
    def lane(model, until=float("inf")):
        return Lane(Row(model=model, provider="p"), [sys.executable, "-c", TIMED], 60, until)

    groups = [[lane("bad"), lane("good")], [lane("late", time.monotonic())], [lane("last")]]
    rows = [row for some in measured(groups, {}, 2, 1, lambda lane: None) for row in some]
    assert [(row.model, row.step_ms, row.error) for row in rows] == [
        *(("bad", None, "broken"), ("good", 3.0, None)),
        *(("late", None, "not started: out of time"), ("last", 3.0, None)),
    ]
    assert rows[1].step_ms_all == [3.0, 3.0] and rows[1].peak_mem_gib == 4.0


def test_an_answer_comes_by_the_end_of_all(lane):
    lane.until = time.monotonic()
    assert lane.ask({"do": "sleep"}) == {} and lane.row.error.startswith("not finished after ")


def test_rotated():
    assert rotated("abc", 4) == ["b", "c", "a"]
