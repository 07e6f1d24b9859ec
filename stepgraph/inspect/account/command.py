"""``stepgraph inspect``: the page of a run or of a preset."""

import sys
from pathlib import Path
from typing import Any

from stepgraph.config.command_line import given, parse, require_folder
from stepgraph.config.commands import FORECAST, InspectOptions
from stepgraph.config.idle import refuse_idle
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS, Gpu
from stepgraph.errors import unknown_name
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.account.page import PAGE, read_page, write_page
from stepgraph.inspect.forecast.forecast import simulated, with_microbatches
from stepgraph.inspect.forecast.pipeline import simulated_stage
from stepgraph.passes import Target
from stepgraph.passes.waiting import Waiting


def main(argv: list[str]) -> int:
    """Runs ``stepgraph inspect ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    named = bool(argv) and not argv[0].startswith("-")
    if not named and not {"-h", "--help"} & set(argv):
        raise ValueError(
            "inspect takes a run folder or a preset first: write stepgraph inspect llama3-8b --mesh fsdp=4"
        )
    what, words = (argv[0], argv[1:]) if named else ("llama3-debug", argv)
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
    if what not in PRESETS and (unused := given(words) - {"html"}):
        flag = "--" + min(unused).replace("_", "-")
        raise ValueError(f"{flag} is about a preset, and {what} has run: leave it out")
    with Waiting(lambda line: print(line, file=sys.stderr, flush=True)):
        account = _account(what, config, options, words)
    try:
        write_page(options.html, account)
    except OSError as error:
        raise ValueError(f"html={options.html} cannot be written: {error.strerror}; give another file") from error
    print(f"page {options.html}, {options.html.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0


def _account(what: str, config: TrainConfig, options: InspectOptions, words: list[str]) -> dict[str, Any]:
    """The account of a preset, with ``config``, of a run folder or of a page."""
    if what in PRESETS:
        gpu, config = GPUS[options.gpu], with_microbatches(config, words)
        config.validate()
        refuse_idle(config, words, Target.forecast(gpu))
        return preset_account(config, gpu, options.stage, options.text)
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
