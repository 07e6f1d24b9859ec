"""What each command of ``stepgraph`` takes, for help and wrong names before torch is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepgraph.options import PARTS, BatchOptions, DeviceOptions, MeshOptions, StepOptions, UpdateOptions


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


@dataclass(frozen=True)
class InspectOptions(ForecastOptions):
    """Show a step as a page for the browser: where its time goes, what fills its memory, what each pass did."""

    html: Path = Path("page.html")
    """The file to write."""

    ranks: bool = False
    """Instead of a page: say whether all ranks of the mesh have one graph, what differs and why. Status 1 if not."""

    text: Path | None = None
    """Also write the graphs of a preset as text into this file."""

    stage: int | None = None
    """With pp, show the graphs of the rank that has this stage. None: the first."""


@dataclass(frozen=True)
class SampleOptions(DeviceOptions):
    """Write text with the model of a run, or of RUN/checkpoints/step-N, after a prompt."""

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


@dataclass(frozen=True)
class RecordFile:
    """Where the record goes."""

    json: Path | None = None
    """Write the record to this file as it grows; stepgraph bench report reads it."""


@dataclass(frozen=True)
class StepBench(RecordFile):
    """Measure a training step under each provider: same model, weights and batch, a process each.

    --passes to --cuda-graph are for stepgraph's providers; bf16-autocast and bf16 both mean autocast.
    """

    providers: str = "eager,compile,compile-max-autotune,stepgraph,stepgraph-exact"
    """Names with commas between; --help-all lists them."""

    steps: int = 10
    """Steps in a repeat; its result is their median."""

    repeats: int = 5
    """Repeats; providers that live at once take turns, one repeat each."""

    together: int = 1
    """Providers that build and compile at once in a GPU's memory; repeats are timed one by one. On a CPU: all."""


@dataclass(frozen=True)
class TrainBench(RecordFile):
    """Measure a training step over several devices: same model, mesh, batch and precision, one provider after another.

    --help-all shows the preset's own sizes as defaults. --memory and --reshard are for every provider (torchtitan has
    no memory budget); --passes to --cuda-graph besides are for stepgraph's step: torchtitan compiles block by block.
    """

    balanced_routing: bool = False
    """Every expert gets as many tokens, whatever the routers say: both providers' speed without imbalance."""

    providers: str = "stepgraph,torchtitan"
    """Names with commas between; --help-all lists them. One that is not installed, or cannot do this work, is
    reported as such."""

    steps: int = 20
    """Steps that are timed; the result is their median."""

    timeout: float = 600.0
    """Seconds after which a provider is given up."""

    traces: Path | None = None
    """Keep rank 0's profiler trace of each provider in this folder, as PROVIDER.json.gz. GPUs only."""


@dataclass(frozen=True)
class ModelBench(DeviceOptions, RecordFile):
    """Measure a training step of unmodified transformers models, built from their configurations, a process each. NAME
    all: all of them; --help-all lists them."""

    providers: str = "eager,compile,compile-max-autotune-no-cudagraphs,liger,liger-compile,stepgraph"
    """Names with commas between; --help-all lists them."""

    steps: int = 10
    """Steps in a round; its result is their median."""

    rounds: int = 5
    """Rounds; the result is their median."""

    limit_s: float = 600
    """Seconds that a provider may take for its first steps, or for a round; then it is ended."""

    total_s: float | None = None
    """Seconds for all: what is not done by then is ended and reported, so that tables and record are complete."""

    together: int = 1
    """Providers of a model that build and compile at once, all in one GPU's memory; rounds are timed one by one."""

    models_together: int = 1
    """Models whose providers build and compile at once, as far as they fit the GPU's memory by models.json's figures;
    timing begins when all of them are built. One that ran out of memory among others is measured again, alone."""

    profile: Path | None = None
    """Write where stepgraph's step spends its time into this folder, as MODEL.PROVIDER.md."""


@dataclass(frozen=True)
class NormBench(DeviceOptions, RecordFile):
    """Measure RMS norm and layer norm, forward and backward, next to eager, torch.compile and other packages."""

    op: Literal["rms_norm", "layer_norm", "both"] = "both"
    """Which norm; layer norm has a bias."""

    direction: Literal["fwd", "bwd", "both"] = "both"
    """fwd: as in training, storing what backward needs. bwd: the gradients of x, weight and bias."""

    shapes: str = "grid"
    """Rows x row length with commas between, such as 12288x2880,65536x256. grid: row lengths from 64 to 131072 with 1
    to 1048576 rows, up to 2 GiB a tensor, in an order of which any first part is a fair sample; few on a CPU. random:
    120 shapes that are drawn, always the same, with row lengths of any kind, odd ones among them; the small ones on a
    CPU."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """The dtype of all tensors."""

    timing: Literal["auto", "do_bench", "graph", "both"] = "auto"
    """do_bench: single calls, launches included. graph: kernel time alone, by a CUDA graph over rotating buffers. auto:
    both on a GPU, wall clock on a CPU."""

    providers: str = "ours,eager,compile,compile-max-autotune,compile-tuned,quack,liger"
    """Names with commas between; --help-all lists them. One whose package is not installed is reported as missing."""

    budget: float | None = None
    """Seconds after which no further shape is begun; those left out are named."""


@dataclass(frozen=True)
class ReportOptions:
    """Show what stepgraph bench step, train, model or norm recorded with --json."""


#: What forecasts take of a run, besides its model.
FORECAST = (BatchOptions, UpdateOptions, MeshOptions, StepOptions)

#: What the benchmarks of a preset's training step take of a run. The options of the step are for stepgraph's providers.
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

#: Options that a command takes besides.
MORE = {"train": ("--config",), "compile": ("--config",), "bench train": ("--first-step-timeout",)}
