"""What every benchmark of a training step finds of a provider, and its end in one line."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class ProviderRow:
    """One model under one provider. What was not or cannot be measured is null."""

    model: str
    """Name of the preset, or of the model."""
    provider: str
    """A name of the benchmark's ``PROVIDERS``."""
    step_ms: float | None = None
    """Median time of a step, ms."""
    step_ms_all: list[float] = dataclasses.field(default_factory=list)
    """What that is the median of, ms: the median step of each repeat, or each step, on its slowest rank."""
    peak_mem_gib: float | None = None
    """Peak memory, GiB; of what, the benchmark says."""
    losses: list[float | None] = dataclasses.field(default_factory=list)
    """Losses that are compared, nats per token; null where not finite."""
    first_step_s: float | None = None
    """To the end of the first step, s, capture and compilation included: from the built model, over ranks from the
    start of the processes."""
    capture_s: float | None = None
    """stepgraph: capture and passes, s, compilers left out."""
    compile_s: float | None = None
    """stepgraph: compilers and recording of CUDA graphs, s. Others that compile: the first step, less a step."""
    phases_s: dict[str, float] | None = None
    """Seconds in each phase of the provider's process, or rank 0's (`bench.progress`)."""
    passes: list[str] | None = None
    """stepgraph: what each pass did, line by line."""
    versions: dict[str, Any] | None = None
    """Versions of packages in the provider's process."""
    unavailable: str | None = None
    """Why the provider was not measured, in one line: it is not installed, or cannot do this work. No failure."""
    error: str | None = None
    """Why it failed, in one line. Figures taken before are kept."""
    disagreement: str | None = None
    """Which loss is not that of the provider compared with, in one line."""
