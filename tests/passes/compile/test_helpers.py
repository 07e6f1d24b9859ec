"""Helpers: pieces are shared among them, what they miss is compiled here, and what they make is found on disk."""

import os
import queue
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import stepgraph
from stepgraph import compat
from stepgraph.inductor.library import Compiled
from stepgraph.inductor.packed import unpack
from stepgraph.passes.compile import helper, helpers
from stepgraph.passes.compile.helpers import Helpers
from tests.distributed.ranks import on_processes


class Answering(list):
    """A team, and the list of what each of its ``count`` helpers is sent. ``answers``: theirs, in order."""

    def __init__(self, count, *answers):
        super().__init__(Asked() for _ in range(count))
        self.connections, self.answers = self, list(answers)
        self.process, self.killed, self.ended = self, False, 0

    def send(self, helper, request):
        helper.requests.put(request)

    def get_ready(self, device):
        self.device = device

    def answered(self, helpers):
        return helpers[:1]

    def answer(self, helper):
        return self.answers.pop(0) if self.answers else "it has ended"

    def poll(self):
        return 0 if self.killed else None

    def end(self):
        self.ended += 1


class Asked:
    """What a helper is sent."""

    def __init__(self):
        self.requests = queue.Queue()

    def sizes(self):
        """Of the pieces in its request."""
        return sizes_of(self.requests.get(timeout=60))


@pytest.fixture
def started(monkeypatch):
    """Makes helpers of a team; nothing is on disk."""
    monkeypatch.setattr(compat, "inductor_has_cached", lambda: False)

    def start(*teams):
        monkeypatch.setattr(helpers, "_started", list(teams))
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


def test_no_piece_is_new(started):
    with started(Answering(1, None)) as found:
        assert list(found.share({})) == []


def test_pieces_are_shared_by_size(started):
    team = Answering(2, None, None, None)
    with started(team) as found:
        assert list(found.share(work(1, 40, 9, 30, 25, 12))) == ["a", "e", "f", "b", "c", "d"]
        assert [helper.sizes() for helper in team] == [[40], [9, 30]]
    assert (found.compiled, found.notes, team.ended) == (3, [], 1)


def test_eight_helpers_compile_all_but_what_shows_whether_the_disk_has_it(started, monkeypatch):
    for has_cached in (False, True):
        team = Answering(8, *[None] * 8)
        with started(team) as found:
            monkeypatch.setattr(compat, "inductor_has_cached", lambda has=has_cached: has)
            order = list(found.share(work(1, 2, 3, 4, 5, 6, 7, 8)))
        assert order == (["a", *"hgfedcb"] if has_cached else list("hgfedcba"))
        assert found.compiled == 8 - has_cached


def test_without_helpers_all_is_done_here_in_order(started):
    with started() as found:
        assert list(found.share(work(3, 9, 1))) == ["a", "b", "c"]


def test_what_a_helper_misses_is_told_once_and_left_to_this_process(started):
    with started(Answering(1, "ValueError: no", "ValueError: no")) as found:
        assert sorted(found.share(work(5, 5, 5, 5))) == ["a", "b", "c", "d"]
    assert found.compiled == 0
    assert found.notes == ["a piece not compiled by a helper: ValueError: no"]


def test_what_helpers_get_ready_with_can_be_compiled():
    made = Compiled(*unpack(helper._example(torch.device("cpu"))), lambda args: args)
    assert made.strides == [(64, 1)]


def test_what_cannot_be_packed_stays_here(started):
    team = Answering(1)
    with started(team) as found:
        assert list(found.share(work(5, 5, options={"pass": lambda graph: None}))) == ["b", "a"]
    assert team[0].requests.empty() and team.ended == 1
    assert found.notes[0].startswith("a piece not compiled by a helper: ")


def test_pieces_are_loaded_without_helpers_as_long_as_they_are_on_disk(started, monkeypatch):
    team = Answering(2, *[None] * 4)
    with started(team) as found:
        monkeypatch.setattr(compat, "inductor_has_cached", lambda: True)
        order, got = found.share(work(4, 8, 2, 6, 1)), []
        for key in order:
            got.append(key)
            found.on_disk = key in "ec"
        assert got == ["e", "a", "c", "d", "b"] and found.compiled == 1  # a and c are of this process anyway


def test_once_they_are_stopped_nobody_waits(started):
    team = Answering(1)
    with started(team) as found:
        order = found.share(work(5, 5))
        assert next(order) == "b"
        found.stop()
        assert list(order) == ["a"]
    assert (team.ended, found.notes) == (1, [])


@pytest.mark.parametrize(
    "script, limit, reason",
    [
        ("import time; time.sleep(60)", 1, "not finished within 1 s"),
        ("pass", 300, "the process that was to compile it has ended"),
    ],
    ids=["hangs", "ends"],
)
def test_a_process_that_gives_no_answer_is_not_waited_for(script, limit, reason, monkeypatch):
    run = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kept: run([sys.executable, "-c", script], **kept))
    monkeypatch.setattr(helpers, "_LIMIT_S", limit)
    team = helpers.Team(1)
    try:
        assert team.answered(team.connections) == team.connections and team.answer(team.connection) == reason
        assert team.answered(team.connections) == team.connections  # at once
        assert team.answer(team.connection) == "the process that was to compile it has ended"
    finally:
        team.end()


def test_helpers_that_do_not_end_hold_up_nothing(monkeypatch):
    """A driver may take minutes to free what a process held, while other ranks wait in their first collective."""
    killed = []

    class Held:
        pid = 7

        def poll(self):
            return None

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("helper", timeout)

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Held())
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append((group, number)))
    helpers.Team(2).end()
    assert killed == [(7, signal.SIGTERM)]


FORKS = """
import os, sys, time
from stepgraph import compat
from stepgraph.passes.compile import helper
compat.import_inductor = lambda: None
def serve(connection):
    connection.send(os.getpid())
    connection.recv()
    if connection.recv() == "end":
        os._exit(0)
    time.sleep(600)
helper.serve = serve
helper.main(*map(int, sys.argv[1:]))
"""


def test_helpers_are_forks_that_end_one_by_one_and_together(monkeypatch):
    run = subprocess.Popen
    monkeypatch.setenv("PYTHONPATH", str(Path(stepgraph.__file__).parents[1]))
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **kept: run([sys.executable, "-c", FORKS, *command[4:]], **kept)
    )
    team = helpers.Team(3)
    one, other, last = team.connections
    pids = [connection.recv() for connection in team.connections]
    assert len({team.process.pid, *pids}) == 4
    for connection in team.connections:
        connection.send("request")
    one.send("end")
    assert (
        team.answered([one]) == [one]
        and team.answer(one) == "the process that was to compile it has ended"
        and not other.poll()
    )
    last.send("sleep")
    began = time.monotonic()
    team.end()
    assert team.process.returncode == 0 and time.monotonic() - began < 60
    assert team.answer(other) == team.answer(last) == "the process that was to compile it has ended"


@pytest.mark.parametrize(
    "ranks, there, met, count",
    [
        (1, None, False, 8),
        (2, None, True, 8),
        (8, "8", True, 3),
        (8, "8", False, 3),
        (8, "2", True, 8),
        (32, None, True, 0),
    ],
)
def test_ranks_of_a_machine_share_its_cores_before_they_meet_too(ranks, there, met, count, monkeypatch):
    monkeypatch.setattr(helpers, "Team", Answering)
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
    assert [len(team) for team in helpers._started] == [count] * (count > 0)
    for team in helpers._started:
        team.killed = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    helpers.start_helpers()
    assert [(len(team), team.killed, team.device) for team in helpers._started] == [(count, False, 5)] * (count > 0)


def test_a_capture_leaves_no_helpers(monkeypatch):
    """Nobody asks them if the trace fails, or the step was saved."""
    team = Answering(2)
    monkeypatch.setattr(helpers, "_started", [team])
    with pytest.raises(ZeroDivisionError):
        stepgraph.capture(nn.Linear(2, 2), lambda model, x: 1 / 0, torch.ones(1, 2))
    assert helpers._started == []
    while not team.ended:  # by a thread
        time.sleep(0.01)


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
model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(16), nn.GELU()) for _ in range(2)])
loss, batch = (lambda model, x: model(x).square().mean()), torch.ones(int(sys.argv[1]), 16)
passes = ["dead_code", "fuse_norm", "tag_regions", get("inductor", mode="regional")]
"""
OF_A_RANK = """
from stepgraph.parallel import next_token_loss
from tests.distributed.ranks import make_mesh, own_batch, parallel_model
compat.init_fake_world(0, 2)
mesh = make_mesh("fsdp=2")
model, loss, batch, passes = parallel_model(mesh), next_token_loss(mesh), own_batch(mesh, 0), ["inductor"]
"""
SCRIPT = """
import gc, sys, torch, stepgraph
from torch import nn
from torch._dynamo.utils import counters
from stepgraph import compat
from stepgraph.passes import get
from stepgraph.passes.compile import helpers
{}
for helped in (True, False):
    if helped:
        helpers._started.append(helpers.Team(1))
    step = stepgraph.capture(model, loss, batch, passes=passes)
    report = step.report[-1]
    traced_again = counters["aot_autograd"]["autograd_cache_miss"] - counters["inductor"]["fxgraph_cache_miss"]
    found = traced_again, [note for note in report.notes if "helper" in note]
    print(step(batch).item(), report.summary.partition("(")[2], *found)
    del report
    del step
    gc.collect()  # this process forgets its pieces
"""


@pytest.mark.slow
@pytest.mark.parametrize("job, pieces", [(ALONE, 3), pytest.param(OF_A_RANK, 2, marks=pytest.mark.long)])
def test_a_helper_compiles_what_this_process_then_loads(job, pieces, tmp_path):
    """The second capture finds all on disk: neither bits nor keys depend on who compiled a piece. Alone a batch of
    this run alone, and the cache of all tests: in an empty one the headers of C++ are compiled first."""
    environment = os.environ | {"PYTHONPATH": str(Path(stepgraph.__file__).parents[1])}
    if job == OF_A_RANK:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT.format(job), str(random.SystemRandom().randrange(8, 100_000, 8))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    (made, how), (loaded, again) = (line.split(" ", 1) for line in ran.stdout.splitlines()[-2:])
    assert made == loaded
    assert how == f"0 of {pieces} loaded from disk, 1 compiled by helpers) 0 []"
    assert again == f"{pieces} of {pieces} loaded from disk) 0 []"
