"""Helpers: pieces are shared among them, what they miss is compiled here, and what they make is found on disk."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

import stepgraph
from stepgraph import compat
from stepgraph.inductor.packed import unpack
from stepgraph.passes.compile import helper, helpers
from stepgraph.passes.compile.helpers import Helpers
from tests.distributed.ranks import on_processes


class Answering:
    """A helper that answers what it is told to."""

    def __init__(self, *answers, ready=True):
        self.answers, self.is_ready = list(answers), ready
        self.requests, self.killed, self.ended = [], False, 0
        self.process = self  # which is killed

    def ready(self):
        return self.is_ready

    def send(self, request):
        self.requests.append(request)

    def answer(self):
        return self.answers.pop(0) if self.answers else "it has ended"

    def kill(self):
        self.killed = True

    def poll(self):
        return 0 if self.killed else None

    def end(self):
        self.ended += 1


@pytest.fixture
def started(monkeypatch):
    """Makes helpers of those that are given."""

    def start(*those):
        monkeypatch.setattr(helpers, "_started", list(those))
        return Helpers()

    return start


def work(*sizes, options=None):
    """Pieces by name, in alphabetical order, of so many operators."""
    found = {}
    for name, size in zip("abcdefgh", sizes, strict=False):
        graph = fx.Graph()
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(2)
        for _ in range(size):
            node = graph.call_function(torch.ops.aten.sin.default, (node,))
        graph.output(node)
        found[name] = fx.GraphModule({}, graph), options or {}
    return found


def sizes_of(request):
    return [sum(n.op == "call_function" for n in unpack(data)[0].graph.nodes) for data in request.pieces]


def test_helpers_are_killed_together_before_any_is_waited_for(started):
    waited = []

    class Slow(Answering):
        def end(self):
            waited.append([helper.killed for helper in both])

    both = [Slow(), Slow()]
    started(*both).stop()
    assert waited == [[True, True], [True, True]]


def test_no_piece_is_new(started):
    with started(Answering(None, ready=False)) as found:
        assert list(found.share({})) == []


def test_pieces_are_shared_by_size_and_the_first_stays_here(started):
    one, other = Answering(None, None), Answering(None, None)
    with started(one, other) as found:
        assert list(found.share(work(1, 40, 9, 30, 25, 12))) == ["a", "e", "f", "b", "c", "d"]
        assert [sizes_of(helper.requests[0]) for helper in (one, other)] == [[40], [9, 30]]
        assert one.ended == other.ended == 1  # each when it is done
    assert (found.compiled, found.notes) == (3, [])


def test_without_helpers_all_is_done_here_in_order(started):
    with started() as found:
        assert list(found.share(work(3, 9, 1))) == ["a", "b", "c"]


def test_one_that_is_not_ready_after_the_first_piece_gets_nothing(started):
    never, late = Answering(ready=False), Answering(None, ready=False)
    with started(never, late) as found:
        order = found.share(work(3, 9, 1))
        assert next(order) == "a"
        late.is_ready = True
        assert list(order) == ["b", "c"]
    assert (never.requests, never.ended, found.compiled) == ([], 1, 1)
    assert [sizes_of(request) for request in late.requests] == [[1]]


def test_what_a_helper_misses_is_told_once_and_left_to_this_process(started):
    with started(Answering("ValueError: no", "ValueError: no")) as found:
        assert sorted(found.share(work(5, 5, 5, 5))) == ["a", "b", "c", "d"]
    assert found.compiled == 0
    assert found.notes == ["a piece not compiled by a helper: ValueError: no"]


def test_what_cannot_be_packed_stays_here(started):
    helper = Answering()
    with started(helper) as found:
        assert list(found.share(work(5, 5, options={"pass": lambda graph: None}))) == ["a", "b"]
    assert helper.requests == [] and helper.ended == 1
    assert found.notes[0].startswith("a piece not compiled by a helper: ")


def test_once_they_are_stopped_nobody_waits(started):
    helper = Answering()
    with started(helper) as found:
        order = found.share(work(5, 5))
        assert next(order) == "a"
        found.stop()
        assert list(order) == ["b"]
    assert (helper.ended, found.notes) == (1, [])


@pytest.mark.parametrize(
    "script, limit, reason",
    [
        ("import time; time.sleep(60)", 1, "not done within 1 s"),
        ("pass", 300, "the process that was to compile it has ended"),
    ],
    ids=["hangs", "ends"],
)
def test_a_process_that_gives_no_answer_is_not_waited_for(script, limit, reason, monkeypatch):
    run = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kept: run([sys.executable, "-c", script], **kept))
    monkeypatch.setattr(helpers, "_LIMIT_S", limit)
    helper = helpers._Helper()
    try:
        assert helper.answer() == reason
    finally:
        helper.end()


def test_a_killed_helper_that_does_not_end_holds_up_nothing(monkeypatch):
    """A driver may take minutes to free what a process held, while other ranks wait in their first collective."""

    class Held:
        killed = False

        def kill(self):
            self.killed = True

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("helper", timeout)

    held = Held()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: held)
    helpers._Helper().end()
    assert held.killed


@pytest.mark.parametrize(
    "ranks, there, met, count",
    [
        (1, None, False, 4),
        (2, None, True, 4),
        (8, "8", True, 1),
        (8, "8", False, 1),
        (8, "2", True, 4),
        (16, None, True, 0),
    ],
)
def test_ranks_of_a_machine_share_its_cores_before_they_meet_too(ranks, there, met, count, monkeypatch):
    monkeypatch.setattr(helpers, "_Helper", Answering)
    monkeypatch.setattr(helpers, "_started", [])
    monkeypatch.setattr(compat, "compile_threads", lambda: 32)
    monkeypatch.setattr(os, "cpu_count", lambda: 48)
    monkeypatch.setattr(helpers.dist, "is_initialized", lambda: met)
    monkeypatch.setattr(helpers.dist, "get_world_size", lambda: ranks)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if there is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", there)
    helpers.start_helpers()
    helpers.start_helpers()  # by the next capture
    assert len(helpers._started) == count
    for one in helpers._started:
        one.kill()
    helpers.start_helpers()
    assert len(helpers._started) == count and not any(one.killed for one in helpers._started)


def _reduced(name):
    """A piece that reduces over the group ``name``."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(2)
    node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (node, "sum", name))
    graph.output(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (node,)))
    return {"a": (fx.GraphModule({}, graph), {})}


def _of_a_rank(_):
    compat.init_fake_world(3, 4)
    compat.name_group(torch.distributed.new_group([1, 3]), "data")
    request = helpers._request(_reduced("data"), [])
    assert (request.place, request.groups) == ((3, 4), {"data": [1, 3]})
    torch.distributed.destroy_process_group()
    assert helper._named(*request.place, request.groups)
    assert compat.process_group("data").size() == 2
    torch.distributed.destroy_process_group()
    assert not helper._named(3, 4, {"data": [1, 3], "0": [2, 3]})  # torch's own name of all ranks


def test_a_helper_has_the_groups_that_the_pieces_of_a_rank_name():
    on_processes(1, _of_a_rank, ())


ALONE = """
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(16, float(sys.argv[1])), nn.GELU()) for _ in range(2)])
loss, batch = (lambda model, x: model(x).square().mean()), torch.ones(8, 16)
passes = ["tag_regions", get("inductor", mode="regional")]
"""
OF_A_RANK = """
from stepgraph.parallel import next_token_loss
from tests.distributed.ranks import make_mesh, own_batch, parallel_model
compat.init_fake_world(0, 2)
mesh = make_mesh("fsdp=2")
model, loss, batch, passes = parallel_model(mesh), next_token_loss(mesh), own_batch(mesh, 0), ["inductor"]
"""
SCRIPT = """
import gc, sys, time, torch, stepgraph
from torch import nn
from stepgraph import compat
from stepgraph.passes import get
from stepgraph.passes.compile import helpers
{}
for helped in (True, False):
    if helped:
        helpers._started.append(helpers._Helper())
        while not helpers._started[0].ready():
            time.sleep(0.1)
    step = stepgraph.capture(model, loss, batch, passes=passes)
    report = step.report[-1]
    print(step(batch).item(), report.summary.partition("(")[2], [note for note in report.notes if "helper" in note])
    del report
    del step
    gc.collect()  # this process forgets its pieces
"""


@pytest.mark.slow
@pytest.mark.parametrize("job, pieces", [(ALONE, 3), pytest.param(OF_A_RANK, 2, marks=pytest.mark.long)])
def test_a_helper_compiles_what_this_process_then_loads(job, pieces, tmp_path):
    """The second capture finds all on disk: neither bits nor keys depend on who compiled a piece. Alone an eps of this
    run alone, and the cache of all tests: in an empty one the headers of C++ are compiled first."""
    environment = os.environ | {"PYTHONPATH": str(Path(stepgraph.__file__).parents[1])}
    if job == OF_A_RANK:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT.format(job), str(1e-5 * (1 + random.SystemRandom().random()))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    (made, how), (loaded, again) = (line.split(" ", 1) for line in ran.stdout.splitlines()[-2:])
    assert made == loaded
    # An earlier run on this machine may have left the piece that knows no eps.
    assert re.fullmatch(rf"[01] of {pieces} loaded from disk, 1 compiled by helpers\) \[\]", how)
    assert again == f"{pieces} of {pieces} loaded from disk) []"
