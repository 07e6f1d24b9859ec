"""The end of a run that two threads find at once."""

import threading
from types import SimpleNamespace

from stepgraph.train import closing
from stepgraph.train.faults.recoverable import RecoverableErrors
from stepgraph.train.records.folder import RunFolder


def test_the_first_reason_is_kept_and_the_second_waits_for_its_records(tmp_path, monkeypatch):
    written, writing, go_on = [], threading.Event(), threading.Event()
    folder = RunFolder(tmp_path / "run")

    def write_summary(summary):
        writing.set()
        assert go_on.wait(30)
        written.append(summary)

    folder.write_summary = write_summary
    run = SimpleNamespace(
        ending=threading.Lock(), ended=False, failures=RecoverableErrors(), folder=folder, snapshot=None, page=None,
        last_loss=None, say=lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(closing, "summarize", lambda _, status, error: (status, error))
    first = threading.Thread(target=closing.close, args=(run, "failed", "no progress"))
    first.start()
    assert writing.wait(30)
    second = threading.Thread(target=closing.close, args=(run, "failed", "lost another rank"))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # the process must not end before the records are written
    go_on.set()
    first.join(30), second.join(30)
    assert written == [("failed", "no progress")] and run.failures.first is None
