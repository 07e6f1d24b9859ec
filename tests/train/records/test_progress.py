"""The progress line, on a terminal and in a log."""

import io
import re

import pytest
from rich.console import Console

from stepgraph.train.records import progress
from stepgraph.train.records.progress import Progress, format_progress, shortened

FIGURES = {
    "loss": 4.12341,
    "grad_norm": 0.968,
    "step_ms": 117.6,
    "tokens_per_s": 139_200.0,
    "mem_gib": 48.87,
    "lr": 2e-3,
}


def test_the_progress_line():
    line = format_progress(20, 1000, **FIGURES, mfu=0.412, eta_s=115)
    assert line == (
        "step 20/1000 | loss 4.1234 | lr 2.0e-03 | grad_norm 0.97 | 118 ms | 139k tok/s | mfu 41% | mem 48.9 GiB "
        "| eta 1.9m"
    )
    assert format_progress(20, 1000, **FIGURES, eta_s=115) == line.replace(" | mfu 41%", "")


@pytest.mark.parametrize(
    ("step_ms", "tokens_per_s", "eta_s", "shown"),
    [
        (3.14159, 812.4, 0.2, "3.14 ms | 812 tok/s | mem 48.9 GiB | eta 0s"),
        (42.06, 1840.0, 45.0, "42.1 ms | 1.84k tok/s | mem 48.9 GiB | eta 45s"),
        (99.96, 99_960.0, 59.9, "100 ms | 100k tok/s | mem 48.9 GiB | eta 1.0m"),
        (12_345.6, 1_234_000.0, 3600 * 5.26, "12346 ms | 1.23M tok/s | mem 48.9 GiB | eta 5.3h"),
        (999.7, 999_700.0, 86400 * 2.5, "1000 ms | 1.00M tok/s | mem 48.9 GiB | eta 2.5d"),
    ],
)
def test_the_progress_line_scales_its_units(step_ms, tokens_per_s, eta_s, shown):
    figures = FIGURES | {"step_ms": step_ms, "tokens_per_s": tokens_per_s}
    assert format_progress(1, 2, **figures, eta_s=eta_s).endswith(shown)


def test_progress_is_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(100, console=Console(file=out, width=40)) as progress:
        progress.update(9, **FIGURES)
        progress.note("[val] step 9 | val_loss 4.2")
        progress.update(10, **FIGURES)
    first, note, second = out.getvalue().splitlines()
    assert first.startswith("step 9/100 | loss 4.1234 |") and first.endswith("| eta 11s")
    assert note == "[val] step 9 | val_loss 4.2"
    assert second.startswith("step 10/100 |")
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (101, "step 20/1000 | loss 4.1234 | lr 2.0e-03 | grad_norm 0.97 | 118 ms | 139k tok/s | mfu 41% | eta 1.9m"),
        (80, "step 20/1000 | loss 4.1234 | lr 2.0e-03 | 139k tok/s | mfu 41% | eta 1.9m"),
        (60, "step 20/1000 | loss 4.1234 | 139k tok/s | mfu 41% | eta 1.9m"),
        (40, "step 20/1000 | loss 4.1234 | eta 1.9m"),
        (20, "step 20/1000 | loss "),
    ],
)
def test_a_narrow_terminal_shows_fewer_figures(width, shown):
    line = format_progress(20, 1000, **FIGURES, mfu=0.412, eta_s=115)
    assert shortened(line, width) == shown and len(shown) <= width


@pytest.mark.parametrize("width", range(30, 120, 7))
def test_the_live_line_never_wraps(width):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, legacy_windows=False, _environ={"TERM": "xterm"})
    with Progress(100_000, console=console) as progress:
        progress.update(99_999, **FIGURES, expert_load=[1.25])
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).strip()
    assert "\n" not in drawn and all(0 < len(row.rstrip()) <= width for row in drawn.split("\r"))


@pytest.mark.parametrize(("width", "bar"), [(160, True), (80, True), (50, False)])
def test_progress_is_one_live_line_on_a_terminal(width, bar):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, legacy_windows=False, _environ={"TERM": "xterm"})
    with Progress(100, console=console) as progress:
        for step in (1, 2, 3):
            progress.update(step, **FIGURES)
        progress.note("validation")
    assert "step 3/100" in out.getvalue() and "\x1b[2K" in out.getvalue()  # the line is cleared and written again
    assert out.getvalue().count("validation") == 1
    assert ("━" in out.getvalue()) == bar
    assert "eta 1" in out.getvalue()


def test_the_time_left_is_the_wall_clocks(monkeypatch):
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Progress(10, console=Console(file=out)) as shown:
        shown.update(1, **FIGURES | {"step_ms": 1000.0})  # no second reading yet: nine steps of one second
        shown.update(3, **FIGURES | {"step_ms": 1000.0})  # two steps took four seconds: seven more take 14
    assert [line.rsplit("| ", 1)[1] for line in out.getvalue().splitlines()] == ["eta 9s", "eta 14s"]
