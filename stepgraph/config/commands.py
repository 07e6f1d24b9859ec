"""What each command of ``stepgraph`` takes, for help and wrong names before torch is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepgraph.options import PARTS, BatchOptions, DeviceOptions, MeshOptions, StepOptions


@dataclass(frozen=True)
class ForecastOptions:
    """What a step is forecast for."""

    gpu: Literal["h100", "h200", "b200"] = "h200"
    """Machines of eight of these, one 400 Gb/s adapter per GPU."""


@dataclass(frozen=True)
class PlanOptions(ForecastOptions):
    """Forecast memory, communication and time of a preset's training step on a cluster, from its captured graph."""

    imbalance: float = 1.0
    """With ep: rows that the most loaded rank's experts receive over the mean. 1: routing is balanced."""

    json: Path | None = None
    """Write everything to this file: memory block by block, and every collective."""

    plot: Path | None = None
    """With pp, draw the schedule, ranks by time, into this .png, .pdf or .svg file."""


@dataclass(frozen=True)
class InspectOptions(ForecastOptions):
    """Show a step as a page for the browser: where its time goes, what fills its memory, what each pass did."""

    html: Path = Path("page.html")
    """The file to write."""

    against: str | None = None
    """Compare with another run folder, preset or page; a preset takes the same options."""

    ranks: bool = False
    """Instead of a page: say whether all ranks of the mesh have one graph, what differs and why. Status 1 if not."""

    text: Path | None = None
    """Also write the graphs of a preset as text into this file."""

    stage: int | None = None
    """With pp, show the graphs of the rank that has this stage. None: the first."""


@dataclass(frozen=True)
class SampleOptions(DeviceOptions):
    """Write text with the model of a run, or of RUN/checkpoints/step-N, behind a prompt."""

    prompt: str = ""
    """What the text begins with. Empty: the start of a document."""

    chat: bool = False
    """The prompt is a user's message, framed by the tokenizer's chat template; the assistant's answer is written."""

    max_new_tokens: int = 200
    """Largest number of tokens to write; fewer where the model ends the text."""

    temperature: float = 0.8
    """Logits are divided by it. 0: always the most likely token."""

    top_p: float = 1.0
    """Nucleus sampling: draw from the most likely tokens that have this share of the probability, in (0, 1]."""

    seed: int = 0
    """Seeds the random draws."""


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run, or of RUN/checkpoints/step-N, with its tokenizer, for Hugging Face's libraries."""

    out: Path | None = None
    """The folder to write, new or empty."""


#: What forecasts take of a run, besides its model.
FORECAST = (BatchOptions, MeshOptions, StepOptions)

#: Command -> what comes before its options, and the dataclasses of these.
COMMANDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "train": ("[PRESET]", PARTS),
    "compile": ("[PRESET]", PARTS),
    "plan": ("PRESET", (*FORECAST, PlanOptions)),
    "inspect": ("RUN|PRESET", (*FORECAST, InspectOptions)),
    "sample": ("RUN", (SampleOptions,)),
    "export": ("RUN", (ExportOptions,)),
}
