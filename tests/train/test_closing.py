"""The end of a run: records that two threads write at once, and what is left when process groups close."""

import gc
import threading
from types import SimpleNamespace

import torch.distributed as dist

from stepgraph.step import CapturedStep
from stepgraph.train.faults import RecoverableErrors
from stepgraph.train.records.folder import RunFolder
from stepgraph.train.trainer import Run


def test_the_first_reason_is_kept_and_the_second_waits_for_its_records(tmp_path):
    written, writing, go_on = [], threading.Event(), threading.Event()
    folder = RunFolder(tmp_path / "run")

    def write_summary(summary):
        writing.set()
        assert go_on.wait(30)
        written.append(summary)

    folder.write_summary = write_summary
    run = SimpleNamespace(
        ending=threading.Lock(), ended=False, failures=RecoverableErrors(), folder=folder, snapshot=None, page=None,
        last_loss=None, say=lambda _: None, config=SimpleNamespace(export_hf=None), speaks=True,
        saving=SimpleNamespace(saved_step=None), summarize=lambda status, error: (status, error),
    )  # fmt: skip
    run._close = lambda *reason: Run._close(run, *reason)
    first = threading.Thread(target=Run.close, args=(run, "failed", "no progress"))
    first.start()
    assert writing.wait(30)
    second = threading.Thread(target=Run.close, args=(run, "failed", "lost another rank"))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # the process must not end before the records are written
    go_on.set()
    first.join(30), second.join(30)
    assert written == [("failed", "no progress")] and run.failures.first is None


def test_nothing_of_a_step_is_left_when_its_process_groups_close(trainer, tmp_path, monkeypatch):
    """NCCL closes a communicator when the CUDA graphs that recorded it have ended; one that is kept is a hang."""
    closed, destroy = [], dist.destroy_process_group

    def closing_groups(*args):
        closed.append([found for found in gc.get_objects() if isinstance(found, CapturedStep)])
        destroy(*args)

    monkeypatch.setattr(dist, "destroy_process_group", closing_groups)
    left = [found for found in gc.get_objects() if isinstance(found, CapturedStep)]
    options = ("--mesh", "fsdp=1", "--steps", "1", "--warmup-steps", "0", "--val-every", "0", "--checkpoint-every", "0")
    assert trainer.here("--out", tmp_path / "run", *options) == 0
    assert [[step for step in found if step not in left] for found in closed] == [[]]
