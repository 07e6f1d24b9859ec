"""What each command of ``stepgraph`` takes, for help and wrong names before torch is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepgraph.options import PARTS, BatchOptions, DeviceOptions, MeshOptions, StepOptions, UpdateOptions


@dataclass(frozen=True)
class ForecastOptions:
    """Target of the forecast."""

    gpu: Literal["h100", "h200", "b200"] = "h200"
    """GPU model, in machines of eight with one 400 Gb/s network adapter per GPU."""


@dataclass(frozen=True)
class PlanOptions(ForecastOptions):
    """Forecast memory, communication and time of a preset's training step on one GPU or a cluster, from its captured
    graph."""

    imbalance: float = 1.0
    """With ep: the load of the fullest rank's experts, relative to the mean. 1: balanced routing."""

    json: Path | None = None
    """Write everything to this file, including memory by block and every collective."""


@dataclass(frozen=True)
class InspectOptions(ForecastOptions):
    """Show a step as a page for the browser: where its time goes, what fills its memory, what each pass did."""

    html: Path = Path("page.html")
    """The file to write."""

    ranks: bool = False
    """Instead of a page, check that all ranks have the same graph; if not, show what differs and exit with status 1."""

    text: Path | None = None
    """Also write the graphs of a preset to this file, as text."""

    stage: int | None = None
    """With pp: show the rank that has this stage. Default: the first."""


@dataclass(frozen=True)
class SampleOptions(DeviceOptions):
    """Generate text after a prompt, with the model of a run or of RUN/checkpoints/step-N."""

    prompt: str = ""
    """The prompt. Empty: the start of a document."""

    chat: bool = False
    """Treat the prompt as a user message in the tokenizer's chat template, and generate the assistant's answer."""

    max_new_tokens: int = 200
    """Maximum number of tokens to generate; fewer if the model ends the text."""

    temperature: float = 0.8
    """Sampling temperature. 0: always the most likely token."""

    top_p: float = 1.0
    """Nucleus sampling: draw from the most likely tokens with this total probability, in (0, 1]."""

    seed: int = 0
    """Seed of the random draws."""


@dataclass(frozen=True)
class ExportOptions:
    """Write the model and tokenizer of a run, or of RUN/checkpoints/step-N, as a Hugging Face checkpoint."""

    out: Path | None = None
    """The folder to write, new or empty."""


@dataclass(frozen=True)
class RecordFile:
    """The record."""

    json: Path | None = None
    """Write the record to this file as it grows; stepgraph bench report reads it."""


@dataclass(frozen=True)
class StepBench(RecordFile):
    """Measure a training step with each provider: same model, weights and batch, one process per provider.

    --passes to --cuda-graph apply to stepgraph only; bf16-autocast and bf16 both mean autocast.
    """

    providers: str = "eager,compile,compile-max-autotune,stepgraph,stepgraph-exact"
    """Comma-separated names; --help-all lists them."""

    steps: int = 10
    """Steps per repeat; the result is their median."""

    repeats: int = 5
    """Repeats; providers built together are interleaved, one repeat each."""

    together: int = 1
    """Providers to build and compile at once on one GPU; repeats are timed one by one. On a CPU: all."""


@dataclass(frozen=True)
class TrainBench(RecordFile):
    """Measure a training step over several devices: same model, mesh, batch and precision, one provider after another.

    --help-all shows the preset's own sizes as defaults. --memory and --reshard apply to every provider (torchtitan has
    no memory budget), the other options of passes to stepgraph only: torchtitan compiles block by block.
    """

    balanced_routing: bool = False
    """Give every expert the same number of tokens, whatever the routers choose, for all providers."""

    providers: str = "stepgraph,torchtitan"
    """Comma-separated names; --help-all lists them. One that is not installed, or cannot do this work, is
    reported as such."""

    steps: int = 20
    """Timed steps; the result is their median."""

    timeout: float = 600.0
    """Seconds after which a provider is stopped."""

    traces: Path | None = None
    """Keep rank 0's profiler trace of each provider in this folder, as PROVIDER.json.gz. GPUs only."""


@dataclass(frozen=True)
class ModelBench(DeviceOptions, RecordFile):
    """Measure a training step of unmodified transformers models, built from their configurations, one process per
    provider. NAME all: all of them; --help-all lists them."""

    providers: str = "eager,compile,compile-max-autotune-no-cudagraphs,liger,liger-compile,stepgraph"
    """Comma-separated names; --help-all lists them."""

    steps: int = 10
    """Steps per round; the result is their median."""

    rounds: int = 5
    """Rounds; the result is their median."""

    limit_s: float = 600
    """Seconds after which a provider is stopped, in its first steps or in a round."""

    total_s: float | None = None
    """Seconds for the whole benchmark. What is not done by then is stopped and reported as such."""

    together: int = 1
    """Providers of a model to build and compile at once on one GPU; rounds are timed one by one."""

    models_together: int = 1
    """Models whose providers build and compile at once, as far as models.json says they fit in memory; timing starts
    when all are built. A model that ran out of memory next to others is measured again, alone."""

    profile: Path | None = None
    """Write where stepgraph's step spends its time to this folder, as MODEL.PROVIDER.md."""


@dataclass(frozen=True)
class NormBench(DeviceOptions, RecordFile):
    """Measure RMS norm and layer norm, forward and backward, next to eager, torch.compile and other packages."""

    op: Literal["rms_norm", "layer_norm", "both"] = "both"
    """Which norm; layer norm has a bias."""

    direction: Literal["fwd", "bwd", "both"] = "both"
    """fwd: forward in training mode. bwd: the gradients of x, weight and bias."""

    shapes: str = "random"
    """Comma-separated ROWSxLENGTH, such as 12288x2880,65536x256. random: 120 fixed random shapes with any row length,
    odd ones included; only the small ones on a CPU."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """The dtype of all tensors."""

    providers: str = "ours,eager,compile,compile-max-autotune,compile-tuned,quack,liger"
    """Comma-separated names; --help-all lists them. One whose package is not installed is reported as missing."""

    budget: float | None = None
    """Seconds after which no further shape is started; the omitted ones are listed."""


@dataclass(frozen=True)
class ReportOptions:
    """Show what stepgraph bench step, train, model or norm recorded with --json."""


#: The options of a run that forecasts take, besides its model.
FORECAST = (BatchOptions, UpdateOptions, MeshOptions, StepOptions)

#: The options of a run that benchmarks of a preset's step take. The options of the step apply to stepgraph only.
BENCH = (BatchOptions, DeviceOptions, StepOptions)

#: Command -> what comes before its options, and the dataclasses of these.
COMMANDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "train": ("[PRESET]", PARTS),
    "compile": ("[PRESET]", PARTS),
    "plan": ("PRESET", (*FORECAST, PlanOptions)),
    "inspect": ("RUN|PRESET", (*FORECAST, InspectOptions)),
    "sample": ("RUN", (SampleOptions,)),
    "export": ("RUN", (ExportOptions,)),
    "bench step": ("[PRESET ...]", (*BENCH, StepBench)),
    "bench train": ("[PRESET]", (*BENCH, UpdateOptions, MeshOptions, TrainBench)),
    "bench model": ("NAME ...", (ModelBench,)),
    "bench norm": ("", (NormBench,)),
    "bench report": ("FILE.json ...", (ReportOptions,)),
}

#: Further options of a command.
MORE = {"train": ("--config",), "compile": ("--config",), "bench train": ("--first-step-timeout",)}
