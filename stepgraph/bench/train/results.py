"""The results of ``stepgraph bench train``: a row per provider, the table, and our figures over the peer's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.bench.rows import ProviderRow, in_markdown, problems_of, shown, step_ms

OURS, PEER = "stepgraph", "torchtitan"

#: Largest relative difference of two providers' first losses, and of their last, by precision. They start from the same
#: weights; what rounds differently, in bf16 RoPE's tables among them, grows from update to update. In fp8 the scales
#: are not the same: torchao rounds those of rows to powers of two.
TOLERANCES = {"fp32": (1e-4, 1e-3), "bf16": (2e-3, 2e-2), "fp8": (5e-3, 5e-2)}


@dataclass(kw_only=True)
class TrainRow(ProviderRow):
    """One provider's training step over a mesh. What was not or cannot be measured is null."""

    rank_step_ms: list[float] | None = None
    """Each rank's own median, ms."""
    tokens_per_s_per_gpu: float | None = None
    """Tokens of the whole mesh per second at ``step_ms``, over the number of ranks."""
    mfu: float | None = None
    """Model FLOPs utilization in [0, 1], by ``flops_per_token`` and ``peak_flops`` of the settings."""
    peak_mem_gib: float | None = None
    """Peak after the first step, GiB, on the rank that takes most: allocated on a GPU, resident on a CPU."""
    peak_reserved_gib: float | None = None
    """CUDA: the same for memory reserved by torch's allocator, CUDA graphs included."""
    host_ms: float | None = None
    """CUDA: ms until the call of a step returns, from idle GPUs: median, of the slowest rank."""
    start_s: float | None = None
    """Of it: starting the processes and importing."""
    build_s: float | None = None
    """Of it: process groups, model, weights and optimizer."""
    steps_taken: int | None = None
    """Steps up to the last of ``losses``."""
    exposure: dict[str, float] | None = None
    """CUDA: of a profiled step, ms: ``window_ms``, ``communication_ms``, ``exposed_ms``, ``idle_ms``, and ``share``,
    the exposed part of the window; of the rank where that is largest."""
    exposure_all: list[dict[str, float]] | None = None
    """The same of every rank."""
    kernels_ms: dict[str, float] | None = None
    """CUDA: rank 0's most expensive kernels, ms a step, overlap not taken out."""
    environment: dict[str, str] | None = None
    """Variables set for it, as its own launcher does."""


def check_losses(rows: Sequence[TrainRow], precision: str) -> str:
    """Compares every provider's losses with the first one's. Sets ``disagreement`` where they differ by more than the
    tolerance, a share of the first loss, or are not finite. Returns the finding, a line."""
    ran = [row for row in rows if row.losses]
    for row in ran:
        row.disagreement = f"{row.provider}: a loss is not finite" if None in row.losses else None
    usable = [row for row in ran if not row.disagreement]
    for row in usable[1:]:
        row.disagreement = _difference(row, usable[0], precision)
    if wrong := [row.disagreement for row in ran if row.disagreement]:
        return "losses disagree: " + "; ".join(wrong)
    if len(ran) < 2:
        return "no two providers ran: no losses to compare"
    first, last = TOLERANCES[precision]
    return f"losses agree: the first within {first:g}, the last within {last:g} ({precision})"


def _difference(row: TrainRow, reference: TrainRow, precision: str) -> str | None:
    # A model that repeats one batch may know it by heart at the end: what is left of the loss says little by itself.
    scale = abs(reference.losses[0])
    triples = zip(("first", "last"), row.losses, reference.losses, TOLERANCES[precision], strict=True)
    for name, loss, expected, tolerance in triples:
        apart = abs(loss - expected) / scale
        if apart > tolerance:
            return (
                f"{row.provider}: the {name} loss is {loss:.6g}, that of {reference.provider} {expected:.6g}: "
                f"{apart:.1e} of the first apart, tolerance {tolerance:g} ({precision})"
            )
    return None


def ratio(rows: Sequence[TrainRow]) -> float | None:
    """Our tokens per second over torchtitan's; None where either has none."""
    speed = {row.provider: row.tokens_per_s_per_gpu for row in rows}
    return speed[OURS] / speed[PEER] if speed.get(OURS) and speed.get(PEER) else None


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
    return f"{OURS} / {PEER}: no ratio, {'; '.join(reasons)}"


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
