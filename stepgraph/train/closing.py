"""The end of a run: its summary and its plot, written and reported whatever happened."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

from stepgraph.config.device import peak_mem_gib
from stepgraph.config.environment import environment
from stepgraph.costs.hardware import mfu
from stepgraph.models import family_of
from stepgraph.train.export import CLAIM
from stepgraph.train.records.folder import Summary
from stepgraph.train.records.progress import format_seconds

#: What a person opens first.
_RECORDS = ("page.html", "loss.png", "passes.txt", "summary.json", "metrics.jsonl", "tb/")

T = TypeVar("T")


def close(run: Any, status: str, error: str | None) -> None:
    """Write the records of ``run``, a `trainer.Run`, that come last, and say where they are. What cannot be written is
    noted in ``run.failures``. The watch's thread and the main thread may both find a reason to end: the second waits
    until the first has written its own."""
    with run.ending:
        if not run.ended:
            run.ended = True
            _close(run, status, error)


def _close(run: Any, status: str, error: str | None) -> None:
    summary = summarize(run, status, error)
    export, path = run.config.export_hf, run.folder.path

    def show() -> None:
        if run.snapshot:
            run.snapshot.write()
        if run.page is not None:
            program, profile = run.captured and run.captured.program, run.profile and run.profile.result
            run.page.finish(program, summary, profile, run.bubble.measured)

    def draw() -> None:
        if run.last_loss is not None:
            run.folder.draw_loss(run.unigram)

    def claimed() -> None:
        if status == "finished" and export is not None and run.speaks:
            (export / CLAIM).unlink(missing_ok=True)

    for write in (lambda: run.folder.write_summary(summary), claimed, show, draw, run.folder.close):
        with run.failures.noted(Exception):
            write()
    if status == "finished":
        simple, model = (run.unigram, "a context-free model") if run.unigram else (math.log(2), "no preference")
        worse = run.val_loss >= simple
        run.say(
            f"done: {run.step} step{'s' * (run.step != 1)} in {format_seconds(summary.wall_s)}; validation loss "
            f"{run.val_loss:.4f}, {'still worse' if worse else 'better'} than {model} "
            f"({simple:.4f}){': train longer' if worse else ''}"
        )
    names = [name for name in _RECORDS if (path / name).exists()]
    run.say(f"records in {path}: {', '.join(names)}" if names else f"no records in {path}")
    if run.saving.saved_step is not None and (path / "checkpoints").exists():
        run.say(f'sample  stepgraph sample {path} --prompt "..."')
        if family_of(run.config.model).hugging_face is not None:
            run.say(f"export  stepgraph export {path} --out FOLDER")
        epochs = run.config.epochs
        more = f" --steps {2 * run.step}" if epochs is None else f" --epochs {2 * epochs:g}"
        more = more if run.step == run.config.steps else ""
        run.say(f"resume  stepgraph train --resume {path}{more}")


def summarize(run: Any, status: str, error: str | None) -> Summary:
    """The figures of ``run``, a `trainer.Run`, so far."""

    def known(ask: Callable[[], T], otherwise: T) -> T:
        with run.failures.noted(Exception):
            return ask()
        return otherwise

    median = statistics.median(run.times_ms) if run.times_ms else None
    tokens_per_s = run.config.tokens_per_step / (median / 1e3) if median else None
    return Summary(
        status=status,
        error=error,
        preset=run.config.preset,
        params=run.params,
        steps=run.step,
        tokens=run.done["tokens"],
        skipped_steps=run.finite.skipped,
        repeated_steps=run.repeated_steps,
        train_loss_nats=run.last_loss,
        val_loss_nats=run.val_loss,
        unigram_entropy_nats=run.unigram,
        tokens_per_s=tokens_per_s,
        step_ms_median=median,
        mfu=mfu(tokens_per_s, run.flops_per_token, run.peak) if tokens_per_s else None,
        bubble=run.bubble.share,
        capture_s=run.capture_s,
        compile_s=known(lambda: run.compile_s, None),
        peak_mem_gib=peak_mem_gib(run.device),
        wall_s=time.perf_counter() - run.started,
        versions=known(lambda: environment()["versions"], {}),
    )
