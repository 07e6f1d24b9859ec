"""The record of ``stepgraph bench step``, the check that all its providers trained the same, and records as JSON."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgraph.bench.norm.results import NormRow
from stepgraph.bench.rows import Row
from stepgraph.bench.train.results import TrainRow

#: Relative difference of two providers' losses over the first steps that is never too large, by the parameters' dtype.
#: fp32: a compiled kernel sums in another order than eager's and so differs in the last bits of 24 (6e-8); a few
#: updates, in which AdamW divides a gradient by its own size, carry that to 1e-6 in practice, and a wrong gradient or
#: a forgotten clip shows above 1e-3. bf16, also by autocast: eager rounds between operators where a fused kernel does
#: not, each time by up to 2**-9 = 2e-3 of a value and with either sign, so that little of it is left in a mean over
#: thousands of tokens (5e-6 on golf). An update moves these losses by some 5e-3 of themselves: one that is wrong shows
#: above 1e-3. bf16-parameters (``bench model``): updates round to bf16 too, so a gradient near zero whose sign differs
#: moves its parameter by a whole unit in the last place. A first guess, not yet measured on a GPU: five updates move a
#: tiny model's loss by 2e-2, so one without updates shows, and a single wrong gradient may not.
TOLERANCES = {"fp32": 1e-4, "bf16": 1e-3, "bf16-autocast": 1e-3, "bf16-parameters": 1e-2}
#: How far beyond the spread that rounding alone gives, where it was measured (``Row.spread``), losses may be: a kernel
#: rounds elsewhere than the trials of that spread did, of which there are few.
SPREADS = 2
#: The same of losses that the model gives in bf16, of 8 bits: two units in the last place, since rounding may take both
#: apart.
BF16_LOSSES = 2 * 2**-7
#: The tolerance of a provider with products in fp8, whose numbers have 3 bits, at any precision. While the loss of
#: llama3-1b falls from 12 to 2 in four updates, torchao's layers and ours are up to 0.12 from bf16 (one H200).
FP8_TOLERANCE = 0.15


def check_losses(rows: Sequence[Row], precision: str) -> str:
    """Compares every provider's first losses with eager's (without eager: the first provider's), one model's ``rows``.

    Sets ``disagreement`` where they differ by more than the tolerance, or are not finite. The tolerance is that of the
    precision or, where eager measured how far rounding alone takes its losses by a step, `SPREADS` times that if it is
    more. Returns the finding, a line.
    """
    ran = [row for row in rows if row.losses]
    usable = [row for row in ran if None not in row.losses]
    reference = next((row for row in usable if row.provider == "eager"), usable[0] if usable else None)
    spread = (reference and reference.spread) or []
    beyond = f", {SPREADS} times the spread of eager's by rounding alone"
    worst, where = 0.0, ""
    for row in ran:
        constant = FP8_TOLERANCE if "fp8" in row.provider else TOLERANCES[precision]
        row.disagreement = None
        if None in row.losses:
            row.disagreement = f"{row.provider}: the loss of step {row.losses.index(None) + 1} is not finite"
            continue
        for number, (loss, expected) in enumerate(zip(row.losses, reference.losses, strict=True), start=1):
            difference = abs(loss - expected) / abs(expected)
            coarse = (
                [BF16_LOSSES] if precision == "bf16-parameters" and _in_bf16([*row.losses, *reference.losses]) else []
            )
            tolerance = max([constant, *coarse, *(SPREADS * moved for moved in spread[:number])])
            if difference > tolerance:
                row.disagreement = (
                    f"{row.provider}: the loss of step {number} is {loss:.6g}, that of {reference.provider} "
                    f"{expected:.6g}: {difference:.1e} apart, tolerance {tolerance:.3g} ({precision})"
                    + (beyond if tolerance > max(constant, *coarse, 0) else "")
                )
                break
            if difference > worst:
                worst, where = difference, f" ({row.provider}, step {number})"
    if wrong := [row.disagreement for row in ran if row.disagreement]:
        return "losses disagree: " + "; ".join(wrong)
    if len(ran) < 2:
        return "no two providers ran: no losses to compare"
    return (
        f"losses agree with {reference.provider} over {len(reference.losses)} steps: largest relative difference "
        f"{worst:.1e}{where}, tolerance {TOLERANCES[precision]:g} ({precision})"
        + (f"{beyond} where that is more, up to {SPREADS * max(spread):.1e}" if spread else "")
        + (f", of fp8 {FP8_TOLERANCE:g}" if any("fp8" in row.provider for row in ran) else "")
    )


def _in_bf16(losses: Sequence[float]) -> bool:
    """Whether ``losses`` are numbers of bf16, as models give that compute the loss in the dtype of their logits."""
    return all((256 * math.frexp(loss)[0]).is_integer() for loss in losses)


def finite(value: float) -> float | None:
    """``value``, or None where JSON has no form for it."""
    return value if math.isfinite(value) else None


def in_one_line(error: BaseException) -> str:
    """The kind of ``error``, or of the first error that led to it, and the first two lines that it says.

    A library's own error may say less than what it was raised from: torch's pipelines wrap an out-of-memory error.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]


def write(
    path: Path, environment: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row | TrainRow | NormRow]
) -> None:
    """Writes the record to ``path``."""
    record = {"environment": environment, "settings": settings, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def kind_of(settings: dict[str, Any]) -> str:
    """The benchmark that made a record with these settings: ``step``, ``train``, ``norm`` or ``model``."""
    return settings.get("benchmark", "step")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """(environment, settings, rows) that ``write`` wrote; of the benchmark's class. ValueError for another file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings = record["settings"]
        kind = {"step": Row, "train": TrainRow, "norm": NormRow, "model": Row}[kind_of(settings)]
        known = {field.name for field in dataclasses.fields(kind)}  # older records have others
        rows = [kind(**{name: value for name, value in row.items() if name in known}) for row in record["rows"]]
        return record["environment"], settings, rows
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record of stepgraph bench step, train, norm or model: use a file that --json wrote"
        ) from error
