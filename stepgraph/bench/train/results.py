"""What ``stepgraph bench train`` found: a row for each provider, and ours over the peer's."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.bench.rows import ProviderRow

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
    """CUDA: the same of what torch's allocator held, CUDA graphs included."""
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
