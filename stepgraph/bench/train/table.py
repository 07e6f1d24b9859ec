"""The tables of ``stepgraph bench train``, and ours over torchtitan's."""

from collections.abc import Sequence
from typing import Any

from stepgraph.bench.table import in_markdown, problems_of, shown, step_ms
from stepgraph.bench.train.results import OURS, PEER, TrainRow, ratio


def train_section(model: str, env: dict[str, Any], settings: dict[str, Any], rows: Sequence[TrainRow]) -> str:
    """Everything about one record: heading, table, notes, and last the ratio."""
    cuda = settings["device"] == "cuda"
    columns = {
        "provider": lambda row: row.provider,
        "step ms": step_ms,
        "fastest, slowest": lambda row: ", ".join(
            f"{bound(row.step_ms_all):.4g}" for bound in (min, max) if row.step_ms_all
        ),
        f"tokens/s a {'GPU' if cuda else 'rank'}": shown("tokens_per_s_per_gpu", ",.0f"),
        "peak GiB": shown("peak_mem_gib", ".2f"),
        "first step s": shown("first_step_s", ".1f"),
        "loss": lambda row: f"{row.losses[-1]:.4f}" if row.losses and row.losses[-1] is not None else "",
    }
    if cuda:
        columns["MFU"] = shown("mfu", ".1%")
        columns["host ms"] = shown("host_ms", ".3g")
        columns["reserved GiB"] = shown("peak_reserved_gib", ".2f")
        columns["exposed comm."] = lambda row: f"{row.exposure['share']:.1%}" if row.exposure else ""
    notes = _notes(settings["models"][model], settings, rows)
    return in_markdown(model, env, settings, columns, rows, notes, summary(rows))


def summary(rows: Sequence[TrainRow]) -> str:
    """Ours over torchtitan's in one line, or why there is no such ratio."""
    found = {row.provider: row for row in rows}
    times = ratio(rows)
    if times is not None:
        ours, peer = found[OURS], found[PEER]
        memory = ours.peak_mem_gib / peer.peak_mem_gib
        return f"{OURS} / {PEER}: {times:.3f}x tokens/s, {memory:.2f}x peak memory"
    ran = [row.provider for row in rows if row.step_ms is not None]
    reasons = [f"{name}: {_reason(found.get(name))}" for name in (OURS, PEER) if name not in ran]
    return f"{OURS} / {PEER}: no ratio: {'; '.join(reasons)}"


def _reason(row: TrainRow | None) -> str:
    return "was not asked for" if row is None else row.unavailable or "failed"


def _notes(chosen: dict[str, Any], settings: dict[str, Any], rows: Sequence[TrainRow]) -> list[str]:
    notes = [
        f"step ms: median of {settings['steps']} steps on the slowest rank, after {settings['warmup_steps']} to warm "
        "up; one provider after another, their own compile caches; peaks without the first step"
    ]
    notes += problems_of(rows)
    for row in rows:
        if row.first_step_s is not None:
            notes.append(f"{row.provider}, first step after {row.first_step_s:.1f} s: {_parts(row)}")
        if row.exposure is not None:
            found = row.exposure
            notes.append(
                f"{row.provider}, a step of {settings['traced_steps']} profiled: {found['window_ms']:.4g} ms, "
                f"communicating {found['communication_ms']:.4g}, exposed {found['exposed_ms']:.4g}, "
                f"idle {found['idle_ms']:.4g} (the rank with most exposed; shares of all: "
                f"{', '.join(format(rank['share'], '.1%') for rank in row.exposure_all)})"
            )
    if chosen.get("rounded_weights"):
        notes.append(f"torchtitan's weights and AdamW state are {chosen['precision']}: it mixes precisions by FSDP")
    return [*notes, f"memory {chosen['memory']}, reshard {chosen['reshard']}", chosen["losses"]]


def _parts(row: TrainRow) -> str:
    parts = {"start": row.start_s, "build": row.build_s, "capture": row.capture_s, "compile": row.compile_s}
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds is not None)
