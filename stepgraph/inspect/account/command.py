"""``stepgraph inspect``: the page of a run or of a preset, alone or compared with another."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepgraph.config.command_line import parse, refuse_idle, require_folder
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import ModelConfig, TrainConfig
from stepgraph.costs.hardware import GPUS, Gpu
from stepgraph.errors import read_json, unknown_name
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.account.compare import difference
from stepgraph.inspect.account.page import PAGE, read_page, write_page
from stepgraph.inspect.forecast.forecast import SETTINGS, microbatches, simulated
from stepgraph.inspect.forecast.pipeline import simulated_stage
from stepgraph.inspect.ranks import graphs_of_ranks, report
from stepgraph.models import llama3_debug
from stepgraph.passes import StepOptions, Target
from stepgraph.passes.waiting import Waiting


@dataclass(frozen=True)
class InspectOptions(StepOptions):
    """Show a step as a page for the browser: where its time goes, what fills its memory, what each pass did."""

    html: Path = Path("page.html")
    """The file to write."""

    against: str | None = None
    """Compare with another run folder, preset or page; a preset takes the same options."""

    ranks: bool = False
    """Instead of a page: say whether all ranks of the mesh have one graph, what differs and why. Status 1 if not."""

    text: Path | None = None
    """Also write the graphs of a preset as text into this file."""

    mesh: str | None = None
    """Ranks, as in fsdp=4,tp=2: see stepgraph plan. None: one GPU. For a preset; a run has its own."""

    pipeline: Literal["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"] | None = None
    """With pp in the mesh, the schedule. None: 1f1b."""

    split: str | None = None
    """With pp, the first block of each stage, as in 0,9,17,25. None: the most even cut by the cost model."""

    stage_sends: str = "point-to-point"
    """With pp: how stages send, through process groups (NCCL), or within a machine into each other's memory."""

    stage: int | None = None
    """With pp, show the graphs of the rank that has this stage. None: the first."""

    gpu: str = "h200"
    """h100, h200 or b200: what a preset's step is forecast for."""

    precision: str = "fp32"
    """As in stepgraph train."""

    seq_len: int = 256
    """Tokens in a sequence."""

    batch_size: int = 8
    """Sequences in a microbatch of one data-parallel rank."""

    accumulate: int | None = None
    """Microbatches in a step. None: the preset's; with pp, if these are too few for it, twice its ranks."""

    reduce_dtype: str = "fp32"
    """Dtype that gradients are reduced in over the mesh."""

    expert_capacity: float = 2.0
    """With ep: room for exchanges, as a multiple of balanced load."""

    expert_chunks: int = 1
    """With ep: split a layer's tokens into N chunks: one travels while experts compute another."""

    expert_exchange: str = "collectives"
    """With ep: how tokens travel, by torch's collectives, or within a machine over symmetric memory, by our kernels."""

    model: ModelConfig = dataclasses.field(default_factory=llama3_debug)
    """Shape of a preset's model."""


def main(argv: list[str]) -> int:
    """Runs ``stepgraph inspect ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    named = bool(argv) and not argv[0].startswith("-")
    if not named and not {"-h", "--help"} & set(argv):
        raise ValueError(
            "inspect takes a run folder or a preset first: write stepgraph inspect llama3-8b --mesh fsdp=4"
        )
    what, words = (argv[0], argv[1:]) if named else ("llama3-debug", argv)
    config = PRESETS[what]() if what in PRESETS else TrainConfig()
    options = parse(
        InspectOptions(model=config.model, **{key: getattr(config, key) for key in SETTINGS if key != "accumulate"}),
        words,
        usage="stepgraph inspect RUN|PRESET",
        description=f"{InspectOptions.__doc__} Presets: {', '.join(PRESETS)}. Defaults below: {config.preset}.",
    )
    options = dataclasses.replace(options, gpu=options.gpu.lower())
    if options.gpu not in GPUS:
        raise unknown_name("gpu", options.gpu, sorted(GPUS))
    require_folder(options.html, "html")
    require_folder(options.text, "text")
    given = _given(words)
    about_runs = {"html", "against", "ranks", "gpu"} if options.ranks else {"html", "against"}
    if what not in PRESETS and given - about_runs:
        raise ValueError(f"--{min(given - about_runs)} is about a preset, and {what} has run: leave it out")
    elsewhere = options.against in PRESETS and options.against != what
    if elsewhere and (shape := [name for name in given if name.startswith("model.")]):
        raise ValueError(f"--{min(shape)} shapes {what}, not {options.against}: compare with a page of that")
    waiting = Waiting(lambda line: print(line, file=sys.stderr, flush=True))
    if options.ranks:
        with waiting:
            return _ranks(what, options, words, given)
    other = None
    with waiting:
        account = _account(what, options, words)
        if options.against is not None:
            model = PRESETS[options.against]().model if elsewhere else options.model
            other = _account(options.against, dataclasses.replace(options, text=None, model=model), words)
    try:
        write_page(options.html, account, other and difference(account, other, what, options.against))
    except OSError as error:
        raise ValueError(f"html={options.html} cannot be written: {error.strerror}; give another file") from error
    print(f"page {options.html}, {options.html.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0


def _given(words: list[str]) -> set[str]:
    """Names of the options in ``words``."""
    names = (word.split("=")[0].removeprefix("--").replace("_", "-") for word in words if word.startswith("--"))
    return {name.removeprefix("no-") for name in names}


def _ranks(what: str, options: InspectOptions, words: list[str], given: set[str]) -> int:
    """Compare the graphs of all ranks of a preset or a run; 1 where they differ."""
    if unused := given & {"html", "against", "text", "stage"}:
        raise ValueError(f"--ranks compares graphs and writes no page: leave --{min(unused)} out")
    config = _preset(what, options, words) if what in PRESETS else _run_config(Path(what))
    graphs = graphs_of_ranks(config, options.gpu)
    print("\n".join(report(config.mesh_spec, graphs)))
    return int(len({graph.digest for graph in graphs}) > 1)


def _run_config(folder: Path) -> TrainConfig:
    file = folder / "config.json"
    if not folder.is_dir():
        raise unknown_name("preset or run", str(folder), PRESETS)
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a run")
    return read_json(file, TrainConfig.from_json)


def _preset(name: str, options: InspectOptions, words: list[str]) -> TrainConfig:
    """The configuration of a preset with ``options``."""
    chosen = {key: getattr(options, key) for key in SETTINGS}
    chosen["accumulate"] = microbatches(options.accumulate, options.mesh, PRESETS[name]())
    chosen |= {key: getattr(options, key) for key in ("mesh", "pipeline", "split")}
    config = dataclasses.replace(PRESETS[name](), **chosen, model=options.model)
    config.validate()
    refuse_idle(config, words, Target.forecast(GPUS[options.gpu]))
    return config


def _account(what: str, options: InspectOptions, words: list[str]) -> dict[str, Any]:
    """The account of a preset, with ``options``, of a run folder or of a page."""
    if what in PRESETS:
        return preset_account(_preset(what, options, words), GPUS[options.gpu], options.stage, options.text)
    path = Path(what)
    if path.is_dir():
        path = path / PAGE
        if not path.is_file():
            raise ValueError(f"{what} has no {PAGE}: give the folder of a run that got as far as its first steps")
    if not path.is_file():
        if path.suffix == ".html":
            raise ValueError(f"{what} is not there: give a page of stepgraph inspect, a run folder or a preset")
        raise unknown_name("preset or run", what, PRESETS)
    return read_page(path)


def preset_account(config: TrainConfig, gpu: Gpu, stage: int | None = None, text: Path | None = None) -> dict[str, Any]:
    """The account of ``config``'s step, which is not run, on ``gpu``; in a pipeline of the rank that has ``stage``.
    ``text``: the file for the graphs as text."""
    staged = config.mesh_spec is not None and config.mesh_spec.pp > 1
    if stage is not None and not staged:
        raise ValueError(f"stage={stage} is of a pipeline and there is none: add pp=2 to --mesh")
    with simulated_stage(config, gpu, stage or 0) if staged else simulated(config, gpu) as (program, groups, *costs):
        if text is not None:
            text.write_text(program.text(), encoding="utf-8")
        return account_of(program, config, gpu, groups, device=None, stages=costs[0] if costs else ())
