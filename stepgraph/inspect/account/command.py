"""``stepgraph inspect``: the page of a run or of a preset, alone or compared with another."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from stepgraph.config.command_line import first_word, given, parse, require_folder
from stepgraph.config.commands import FORECAST, InspectOptions
from stepgraph.config.files import run_config
from stepgraph.config.idle import refuse_idle
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS, Gpu
from stepgraph.errors import unknown_name
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.account.compare import difference
from stepgraph.inspect.account.page import PAGE, read_page, write_page
from stepgraph.inspect.forecast.forecast import simulated, with_microbatches
from stepgraph.inspect.forecast.pipeline import simulated_stage
from stepgraph.inspect.ranks import graphs_of_ranks, report
from stepgraph.options import values
from stepgraph.passes import Target
from stepgraph.passes.waiting import Waiting


def main(argv: list[str]) -> int:
    """Runs ``stepgraph inspect ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    how = "inspect takes a run folder or a preset first: write stepgraph inspect llama3-8b --mesh fsdp=4"
    what, words = first_word(argv, how, "llama3-debug")
    config = PRESETS[what]() if what in PRESETS else TrainConfig()
    config, options = parse(
        words,
        "stepgraph inspect RUN|PRESET",
        config,
        InspectOptions(),
        parts=FORECAST,
        description=f"{InspectOptions.__doc__} Presets: {', '.join(PRESETS)}. Defaults below: {config.preset}.",
    )
    require_folder(options.html, "html")
    require_folder(options.text, "text")
    named = given(words)
    about_runs = {"html", "against", "ranks", "gpu"} if options.ranks else {"html", "against"}
    if what not in PRESETS and named - about_runs:
        raise ValueError(f"{_flag(named - about_runs)} is about a preset, and {what} has run: leave it out")
    elsewhere = options.against in PRESETS and options.against != what
    if elsewhere and (shape := {name for name in named if name.startswith("model.")}):
        raise ValueError(f"{_flag(shape)} shapes {what}, not {options.against}: compare with a page of that")
    waiting = Waiting(lambda line: print(line, file=sys.stderr, flush=True))
    if options.ranks:
        with waiting:
            return _ranks(what, config, options, words)
    other = None
    with waiting:
        account = _account(what, config, options, words)
        if options.against is not None:
            if elsewhere:
                config = dataclasses.replace(PRESETS[options.against](), **values(config, *FORECAST))
            other = _account(options.against, config, dataclasses.replace(options, text=None), words)
    try:
        write_page(options.html, account, other and difference(account, other, what, options.against))
    except OSError as error:
        raise ValueError(f"html={options.html} cannot be written: {error.strerror}; give another file") from error
    print(f"page {options.html}, {options.html.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0


def _flag(names: set[str]) -> str:
    return "--" + min(names).replace("_", "-")


def _ranks(what: str, config: TrainConfig, options: InspectOptions, words: list[str]) -> int:
    """Compare the graphs of all ranks of a preset or a run; 1 where they differ."""
    if unused := given(words) & {"html", "against", "text", "stage"}:
        raise ValueError(f"--ranks compares graphs and writes no page: leave {_flag(unused)} out")
    config = _checked(config, options, words) if what in PRESETS else _run_config(Path(what))
    graphs = graphs_of_ranks(config, options.gpu)
    print("\n".join(report(config.mesh_spec, graphs)))
    return int(len({graph.digest for graph in graphs}) > 1)


def _run_config(folder: Path) -> TrainConfig:
    if not folder.is_dir():
        raise unknown_name("preset or run", str(folder), PRESETS)
    return run_config(folder)


def _checked(config: TrainConfig, options: InspectOptions, words: list[str]) -> TrainConfig:
    config = with_microbatches(config, words)
    config.validate()
    refuse_idle(config, words, Target.forecast(GPUS[options.gpu]))
    return config


def _account(what: str, config: TrainConfig, options: InspectOptions, words: list[str]) -> dict[str, Any]:
    """The account of a preset, with ``config``, of a run folder or of a page."""
    if what in PRESETS:
        return preset_account(_checked(config, options, words), GPUS[options.gpu], options.stage, options.text)
    path = Path(what)
    if path.is_dir():
        path = path / PAGE
        if not path.is_file():
            raise ValueError(f"{what} has no {PAGE}: give the folder of a run that has finished its first steps")
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
        raise ValueError(f"stage={stage} needs a pipeline: add pp=2 to --mesh")
    with simulated_stage(config, gpu, stage or 0) if staged else simulated(config, gpu) as (program, groups, *costs):
        if text is not None:
            text.write_text(program.text(), encoding="utf-8")
        return account_of(program, config, gpu, groups, device=None, stages=costs[0] if costs else ())
