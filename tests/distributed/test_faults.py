"""Ranks that are killed, stopped, or do not stop when told: real ranks, real signals, and what is left of the run."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph import cli, compat, parallel
from stepgraph.graph.provenance import provenance
from stepgraph.models import next_token_loss
from stepgraph.parallel import MeshSpec, world
from stepgraph.run.watch import watch
from stepgraph.run.watch.heartbeat import last_told
from stepgraph.run.watch.lost_ranks import is_lost_rank
from stepgraph.run.watch.watch import InFlight, describe, first_in_flight, issue_order
from tests.distributed.ranks import make_mesh, on_processes, on_ranks, own_batch, parallel_model
from tests.distributed.test_train import TINY_RUN, corpus, records, saved, train_on  # noqa: F401

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds ranks in /proc")


#: Seconds for what a machine does in a few, when it has much else to do.
PATIENCE_S = 300


class Job:
    """``COMMAND stepgraph train ...`` as a process of its own, and its ranks."""

    def __init__(self, command, folder, *words):
        self.out, self.err = (folder / name for name in ("out.txt", "err.txt"))
        paths = [str(Path(stepgraph.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        with self.out.open("w") as out, self.err.open("w") as err:
            command = [sys.executable, "-u", *command, "-m", "stepgraph", "train", *map(str, words)]
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in (0, 1):
            if pid := self.find(rank):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def wait_for(self, file, text, times=1):
        """Until ``file`` holds ``text`` so many times."""
        until = time.monotonic() + PATIENCE_S
        while file.read_text().count(text) < times:
            assert time.monotonic() < until and self.process.poll() is None, self.err.read_text()
            time.sleep(0.05)

    def find(self, rank):
        """The process of ``rank``, the agent's child; None if it is gone."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (folder / "environ").read_text().split("\0") if parent == self.process.pid else []
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if f"RANK={rank}" in variables:
                return int(folder.name)
        return None

    def kill(self, rank, number):
        pid = self.find(rank)
        os.kill(pid, number)
        return pid


@linux
@pytest.mark.slow
def test_a_hung_collective_and_a_killed_rank_end_the_ranks_and_are_named(corpus, tmp_path):  # noqa: F811
    words = [*TINY_RUN, "--data", corpus, "--mesh", "fsdp=2", "--nproc", 2, "--max-restarts", 1, "--comm-timeout", 8]
    words += ["--steps", 100000, "--checkpoint-every", 0, "--val-every", 0, "--out", tmp_path / "run"]
    with Job([], tmp_path, *words) as job:
        job.wait_for(job.out, "\nstep 8/")
        stopped = job.kill(1, signal.SIGSTOP)
        job.wait_for(job.err, "made no progress")
        with contextlib.suppress(ProcessLookupError):  # its launcher was quicker
            os.kill(stopped, signal.SIGKILL)
        (line,) = [text for text in job.err.read_text().splitlines() if "made no progress" in text]
        assert line.startswith("error: rank 0 (") and "--comm-timeout 8" in line and f"pid {stopped}) was in" in line
        if "): step " in line:  # not the vote between two steps
            node = line.partition("it waits in ")[2].partition(" ")[0]
            (listed,) = [text for text in graph_text(tmp_path) if text.startswith(f"{node}: ")]
            path = listed.partition("  # ")[2].split()[1]
            assert "_c10d_functional" in listed and f" of {'the model' if path == 'model' else path}, " in line

        # All ranks start again, in the same folder; a rank killed now ends the job.
        job.wait_for(job.out, "restarted after step 0")
        job.wait_for(job.out, "\nstep 8/", times=2)
        killed = job.kill(1, signal.SIGKILL)
        assert job.process.wait(PATIENCE_S) == 1
    *_, last = job.err.read_text().splitlines()
    assert last.startswith(f"error: rank 1 (pid {killed}) was killed by SIGKILL, ") and " s after it was in " in last
    assert any("rank 0 (" in line and " lost another rank (" in line for line in job.err.read_text().splitlines())
    assert "Traceback" not in job.err.read_text()
    assert not list((tmp_path / "run/checkpoints").glob("*"))


def graph_text(folder):
    return (folder / "run/graph.txt").read_text().splitlines()


@linux
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kills", [1, 2])
def test_torchrun_restarts_a_killed_run_and_it_ends_as_if_never_killed(corpus, tmp_path, kills):  # noqa: F811
    words = [*TINY_RUN, "--data", corpus, "--mesh", "fsdp=2", "--val-every", 0, "--steps", 160]
    words += ["--checkpoint-every", 60]
    train_on(2, *words, "--out", tmp_path / "whole")
    command = ["-m", "torch.distributed.run", "--max-restarts", "2", "--nproc-per-node", "2"]
    with Job(command, tmp_path, *words) as job:  # no --out: every attempt comes to the same folder
        if kills > 1:
            job.wait_for(job.out, "\nstep 2/")
            job.kill(1, signal.SIGKILL)
        job.wait_for(job.out, "\nstep 65/")
        job.kill(0, signal.SIGKILL)
        assert job.process.wait(PATIENCE_S) == 0, job.err.read_text()
    text = job.out.read_text()
    assert (kills < 2 or "restarted after step 0\n" in text) and "restarted after step 60\n" in text
    (run,) = (tmp_path / "runs").iterdir()
    assert records(run, "loss", "grad_norm") == records(tmp_path / "whole", "loss", "grad_norm")
    saved_at = "checkpoints/step-00000160"
    before, after = saved(tmp_path / "whole" / saved_at), saved(run / saved_at)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    for name in ("state.json", "rank-00000.json", "rank-00001.json"):
        assert (tmp_path / "whole" / saved_at / name).read_bytes() == (run / saved_at / name).read_bytes(), name


def test_a_rank_that_cannot_heed_sigterm_ends_itself(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessExitedException) as ended:
        on_processes(2, _wait_in_vain, (str(tmp_path),))
    assert ended.value.exit_code == 1 and ended.value.error_index == 0
    assert (tmp_path / "error.txt").read_text() == (
        "step 5 did not stop after SIGTERM: it waits in all_reduce of process group default_pg"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone_says_so_and_ends(rank, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "3"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "_SPEAKS_AFTER_S", 0.2)
    # Without rank 0 there is no store that knows who else has come.
    says = "rank 0 of 3 waited 1 s for 1, 2; start them all" if rank == 0 else "client socket has timed out"
    with pytest.raises(ValueError, match=f"^the ranks cannot meet at localhost:{port}: .*{says}") as alone:
        parallel.started(MeshSpec.parse("fsdp=3"), "cpu", 1.0).__enter__()
    assert "\n" not in str(alone.value)
    assert f"rank {rank} waits for the other ranks of 3 at localhost:{port}, 1 s at most" in capsys.readouterr().err


def test_a_rank_is_known_to_have_begun_its_steps_when_it_has(monkeypatch):
    """However many pass until it reports again."""
    store = dist.HashStore()
    monkeypatch.setattr(parallel, "job_store", lambda: store)
    monkeypatch.setattr(watch, "_POLL_S", 10.0 * PATIENCE_S)
    with watch.Watch(0, 2, "cpu", 300.0, 60.0, print) as watched:
        watched.launches(7)
        until = time.monotonic() + PATIENCE_S
        while "in step 7" not in last_told(store, 0):
            assert time.monotonic() < until
            time.sleep(0.01)


class Clock:
    """The watch's, in seconds: it moves when a test moves it, and then until the watch has looked at it."""

    def __init__(self, monkeypatch):
        self.now, self.asked = 100.0, 0
        for name, seconds in (("_POLL_S", 0.01), ("_LOOK_S", 0.05), ("_SILENT_S", 0.5)):
            monkeypatch.setattr(watch, name, seconds)
        ours = SimpleNamespace(monotonic=self._monotonic, time=time.time, time_ns=time.time_ns)
        monkeypatch.setattr(watch, "time", ours)

    def _monotonic(self):
        self.asked += threading.current_thread().name == "watch"
        return self.now

    def moves(self, seconds, each=lambda: None):
        """By a tenth at a time, each after ``each()``."""
        for _ in range(round(10 * seconds)):
            each()
            self.now += 0.1
            aim = self.asked + 6  # the watch asks once or twice each time that it looks
            while self.asked < aim and any(thread.name == "watch" for thread in threading.enumerate()):
                time.sleep(0.001)

    def moves_during(self, wait, seconds, each=lambda: None):
        """While the main thread is in ``wait(file)``, which ends when there is something to read from ``file``."""
        read, write = os.pipe()
        other = threading.Thread(target=lambda: (self.moves(seconds, each), os.write(write, b"0")))
        other.start()
        wait(read)
        other.join()
        os.close(read)
        os.close(write)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_is_silent_ends_those_that_have_no_limit(told, clock, monkeypatch):
    """In a validation, in a checkpoint, in a capture: the next rank is looked after, until it says that it ends."""
    store, ended = dist.HashStore(), []
    monkeypatch.setattr(parallel, "job_store", lambda: store)
    monkeypatch.setattr(watch.Watch, "_end", lambda self, why, place: ended.append(why))
    with watch.Watch(1, 2, "cpu", 0.1, 60.0, print) as watched:
        watched.at("the checkpoint of step 3", limited=False)
        beat = '[{}, "the checkpoint of step 3", "here", 7]'
        clock.moves(2, lambda: store.set("rank-0", beat.format(clock.now)))  # it works for as long as it may be silent
        assert not ended
        if told:
            store.set("rank-0", '[0.0, "the end", "here", 7]')
        clock.moves(2)
    silent = "the checkpoint of step 3 has lost rank 0 (here, pid 7), silent for "
    assert all(why.startswith(silent) and why.endswith(" since the checkpoint of step 3") for why in ended)
    assert bool(ended) != told


@pytest.fixture
def first_steps(clock, monkeypatch):
    """``first_steps(store, wait, each)``: what rank 1 of 3 says while its main thread is in ``wait(file)`` for two
    seconds of the first step; "" if it says nothing."""
    ended = []
    monkeypatch.setattr(watch, "report", lambda error: None)

    def run(store, wait, each=lambda: None):
        monkeypatch.setattr(parallel, "job_store", lambda: store)
        with watch.Watch(1, 3, "cpu", 300.0, 0.6, ended.append) as watched:
            monkeypatch.setattr(watch.os, "_exit", lambda status: watched._done.set())
            watched.launches(1)
            clock.moves_during(wait, 2, each)
        return ended[0] if ended else ""

    return run


def _stands_still(file):
    os.read(file, 1)


def test_a_first_step_in_which_no_rank_moves_ends_and_says_who_waits_where(first_steps):
    store = dist.HashStore()
    store.set(
        "rank-2", json.dumps([0.0, "step 1, backward.0 of microbatch 0, waiting for stage 1 on rank 1", "b", 9, 0])
    )
    said = first_steps(store, _stands_still)
    assert said.startswith("step 1 made no progress for 1 s, nor did any other rank (--first-step-timeout 0.6): ")
    # By this rank's clock alone, whatever the other's says; a rank that never reported is not waited for.
    assert "rank 2 (b, pid 9) was in step 1, backward.0 of microbatch 0, waiting for stage 1 on rank 1 " in said
    assert "rank 0 has not reported since the start" in said and "does not answer" not in said


def test_a_first_step_whose_python_runs_may_take_long(first_steps, clock):
    """On a loaded machine too: the clock waits until Python is in another line than a moment ago."""
    moments = []

    def runs(file):
        while not select.select([file], [], [], 0)[0]:
            moments.append(clock.now)
            while moments[-1] == clock.now and not select.select([file], [], [], 0.001)[0]:
                pass
            moments.append(clock.now)
            while moments[-1] == clock.now and not select.select([file], [], [], 0.001)[0]:
                pass

    def waits():
        while clock.now not in moments:
            time.sleep(0.001)

    assert first_steps(dist.HashStore(), runs, waits) == ""


def _own_compiler(file):
    subprocess.run(["head", "-c", "1"], stdin=file, stdout=subprocess.DEVNULL, check=True)


def test_a_first_step_that_compiles_may_take_long(first_steps):
    assert first_steps(dist.HashStore(), _own_compiler) == ""


def test_a_first_step_waits_for_a_rank_that_compiles(first_steps, clock):
    store = dist.HashStore()
    assert first_steps(store, _stands_still, lambda: store.set("moved", f"0 {clock.now}")) == ""


def test_a_replay_may_take_as_long_as_the_first_step(clock, monkeypatch):
    ended = []
    monkeypatch.setattr(parallel, "job_store", dist.HashStore)
    monkeypatch.setattr(watch.Watch, "_end", lambda self, why, place, everyone=False: ended.append(why))
    with watch.Watch(0, 2, "cpu", 300.0, 0.2, print) as watched:
        watched.warmed(3.0)
        watched.launches(2)
        clock.moves_during(_stands_still, 2)
        assert not ended
        clock.moves_during(_stands_still, 4)
    assert ended


@pytest.mark.parametrize(("quiet_s", "look_s"), [(0.0, 5.0), (4.0, 0.05)])
def test_a_rank_in_the_same_step_is_named_where_no_other_is(quiet_s, look_s, clock, monkeypatch):
    """Both if it stopped reporting four seconds ago and if it still reports."""
    store, ended = dist.HashStore(), []
    monkeypatch.setattr(parallel, "job_store", lambda: store)
    monkeypatch.setattr(watch, "report", lambda error: None)
    monkeypatch.setattr(watch, "_LOOK_S", look_s)
    with watch.Watch(0, 3, "cpu", 8.0, 60.0, ended.append) as watched:
        monkeypatch.setattr(watch.os, "_exit", lambda status: watched._done.set())
        watched.timed(0.1)
        watched.launches(5)

        def beats():
            for rank in (1, 2):
                if rank == 2 or clock.now < 100 + 8 - quiet_s:
                    store.set(f"rank-{rank}", json.dumps([clock.now, "step 5", "b", 7 + rank, 0]))

        clock.moves_during(_stands_still, 9, beats)
    (said,) = ended
    assert said.startswith("step 5 made no progress for 8 s (--comm-timeout 8, and the slowest step took 0.1 s): ")
    named = re.findall(r"rank (\d) \(b, pid \d\) (was|is) in step 5", said)
    assert sorted(named) == ([("1", "was")] if quiet_s else [("1", "is"), ("2", "is")])


def _wait_in_vain(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 1:
        time.sleep(2 * PATIENCE_S)
    watch._STOP_S = 0.5
    signal.signal(signal.SIGTERM, lambda *_: None)
    with watch.Watch(0, 2, "cpu", 300.0, 60.0, (Path(folder) / "error.txt").write_text) as watched:
        watched.timed(0.01)
        watched.launches(5)
        os.kill(os.getpid(), signal.SIGTERM)
        dist.all_reduce(torch.ones(3))


@pytest.mark.slow
def test_each_recorded_collective_is_found_in_the_graph():
    on_ranks(4, _find_all, "fsdp=2,tp=2", "exact")


@pytest.mark.long
def test_each_recorded_collective_is_found_in_a_graph_compiled_by_inductor():
    on_ranks(2, _find_all, "fsdp=2", "default")


def _find_all(text, passes):
    """Cut the recorder's list after each collective, as if the step hung there: it must be the right node."""
    mesh = make_mesh(text)
    model = parallel_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_fn = stepgraph.parallel.next_token_loss(mesh)
    batch = own_batch(mesh, 0)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0, passes=passes)
    step(batch)
    began = time.time_ns()
    step(own_batch(mesh, 1))
    order = issue_order(step.graph.graph)
    found = compat.flight_records("cpu")
    until = time.monotonic() + PATIENCE_S
    while not all(record["retired"] for record in found):  # gloo's thread retires one after who waits for it goes on
        assert time.monotonic() < until, found
        time.sleep(0.01)
        found = compat.flight_records("cpu")
    since = [record for record in found if record["time_created_ns"] >= began]
    assert len(since) == sum(map(len, order.values())) > 5
    nodes = {}
    for record in since:
        hung = [r | {"retired": r is not record} for r in found]
        waiting = first_in_flight(hung, order, [began])
        nodes.setdefault(record["process_group"][0], []).append(waiting.node)
    assert nodes == order
    assert first_in_flight(found, order, [began]) is None


def _records(*entries, group="g"):
    return [
        {
            "process_group": (group, "dp_shard"),
            "profiling_name": "gloo:all_gather",
            "input_sizes": [[size]],
            "time_created_ns": at,
            "retired": retired,
            "state": "scheduled",
        }
        for at, size, retired in entries
    ]


def test_a_collective_that_the_graph_does_not_have_gets_no_node():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    node = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "g"))
    graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (node,))
    order = issue_order(graph)
    assert order == {"g": [node]}
    what = "all_gather of process group dp_shard"
    assert first_in_flight(_records((1, 4, True)), order, [1]) is None
    assert first_in_flight(_records((1, 4, True), (5, 4, False), (6, 4, False)), order, [5]) == InFlight(node, what, 1)
    assert first_in_flight(_records((5, 4, True), (6, 4, False)), order, [5]) == InFlight(None, what, 0)  # one too many
    # The next step is launched while the host waits for the results of one.
    waiting = _records((5, 4, True), (7, 4, False), (8, 4, False))
    assert first_in_flight(waiting, order, [5, 7]) == InFlight(node, what, 1)
    assert first_in_flight(_records((5, 3, False)), order, [5]) == InFlight(None, what, 0)  # another size
    assert first_in_flight(_records((5, 4, False)), order, [6]) == InFlight(None, what, 0)  # before the step
    assert first_in_flight(_records((5, 4, False), group="h"), order, [5]) == InFlight(None, what, 0)


def test_of_ranks_with_one_error_of_use_the_first_tells_it(monkeypatch, capsys):
    """Each rank is a connection of its own to the agent's store."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = {"TORCHELASTIC_RUN_ID": "run", "MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port)}
    for name, value in agent.items():
        monkeypatch.setenv(name, value)

    def told_by(rank, attempt, *options):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with pytest.raises(SystemExit, match="2"):
            cli.main(["train", *options])
        return capsys.readouterr().err

    said = "error: unknown option --lrr: did you mean --lr?\n"
    assert [told_by(rank, "0", "--lrr", "1") for rank in "012"] == [said, "", ""]
    assert told_by("1", "0", "--stepz", "1") == "error: unknown option --stepz: did you mean --steps?\n"
    assert told_by("2", "1", "--lrr", "1") == said  # after a restart


def test_only_failures_that_another_rank_causes_are_told_as_such():
    assert is_lost_rank(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"))
    assert is_lost_rank(dist.DistBackendError("NCCL error: remote process exited"))
    assert not is_lost_rank(RuntimeError("shape '[3]' is invalid for input of size 4"))
    assert not is_lost_rank(ValueError("gloo/x.cc:3"))


def test_a_node_is_described_by_where_it_comes_from():
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "targets": torch.zeros(1, 8, dtype=torch.int64)}
    model = stepgraph.models.Llama3(stepgraph.models.llama3_debug())
    step = stepgraph.capture(model, next_token_loss, batch, passes="exact")
    node = next(n for n in step.graph.nodes("backward") if step.graph.block_of(n) == "layers.1")
    file, _, line = provenance(node).source.rpartition(":")
    assert Path(file).is_relative_to(Path(stepgraph.models.__file__).parent) and line.isdecimal()
    assert describe(node).endswith(f" of {provenance(node).path}, backward, {Path(file).name}:{line}")


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_launcher_that_is_told_to_stop_lets_its_ranks_save(corpus, tmp_path, number):  # noqa: F811
    words = [*TINY_RUN, "--data", corpus, "--mesh", "fsdp=2", "--nproc", 2, "--steps", 100000]
    words += ["--checkpoint-every", 0, "--val-every", 0, "--out", tmp_path / "run"]
    with Job([], tmp_path, *words) as job:
        job.wait_for(job.out, "\nstep 8/")
        for rank in range(2) if number == signal.SIGHUP else ():  # the terminal tells all that it is gone
            os.kill(job.find(rank), number)
        job.process.send_signal(number)
        assert job.process.wait(PATIENCE_S) == 0, job.err.read_text()
    assert "Traceback" not in job.err.read_text()
    (saved_at,) = (tmp_path / "run/checkpoints").iterdir()
    assert (saved_at / "state.json").exists()


@linux
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["start", pytest.param("steps", marks=pytest.mark.long)])
def test_ranks_end_when_their_launcher_is_killed(corpus, tmp_path, stage):  # noqa: F811
    words = [*TINY_RUN, "--data", corpus, "--mesh", "fsdp=2", "--nproc", 2, "--steps", 100000]
    with Job([], tmp_path, *words, "--val-every", 0, "--out", tmp_path / "run") as job:
        until = time.monotonic() + PATIENCE_S
        while not (ranks := [job.find(0), job.find(1)])[1] or not ranks[0]:
            assert time.monotonic() < until, job.err.read_text()
            time.sleep(0.01)
        if stage == "steps":
            job.wait_for(job.out, "\nstep 8/")
        job.process.kill()
        until = time.monotonic() + PATIENCE_S
        while any(map(is_running, ranks)):
            assert time.monotonic() < until, "they go on"  # 2 s, and the time to import torch at the start
            time.sleep(0.1)
    told = job.err.read_text()
    for rank, pid in enumerate(ranks):
        assert f"error: rank {rank} (pid {pid}): its launcher (pid {job.process.pid}) is gone; " in told


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
