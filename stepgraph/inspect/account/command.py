"""``stepgraph inspect``: the page of a run or of a preset, alone or beside another."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.config.command_line import parse, refuse_idle, require_folder
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS, Gpu
from stepgraph.errors import unknown_name
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.account.compare import difference
from stepgraph.inspect.account.page import PAGE, read_page, write_page
from stepgraph.inspect.forecast.forecast import SETTINGS, simulated
from stepgraph.passes import StepOptions, Target


@dataclass(frozen=True)
class InspectOptions(StepOptions):
    """Show a step as a page for the browser: where its time goes, what fills its memory, what each pass did."""

    html: Path = Path("page.html")
    """The file to write."""

    against: str | None = None
    """Compare with another run folder, preset or page; a preset takes the same options."""

    mesh: str | None = None
    """Ranks, as in fsdp=4,tp=2: see stepgraph plan. None: one GPU. For a preset; a run has its own."""

    gpu: str = "h200"
    """h100, h200 or b200: what a preset's step is forecast for."""

    precision: str = "fp32"
    """As in stepgraph train."""

    seq_len: int = 256
    """Tokens in a sequence."""

    batch_size: int = 8
    """Sequences in a microbatch of one data-parallel rank."""

    accumulate: int = 1
    """Microbatches in a step."""

    reduce_dtype: str = "fp32"
    """Dtype that gradients are reduced in over the mesh."""

    expert_capacity: float = 2.0
    """With ep: room for exchanges, as a multiple of balanced load."""

    expert_chunks: int = 1
    """With ep: a layer's tokens in so many parts, one after the other: one travels while experts compute another."""


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
        InspectOptions(**{key: getattr(config, key) for key in SETTINGS}),
        words,
        usage="stepgraph inspect RUN|PRESET",
        description=f"{InspectOptions.__doc__} Presets: {', '.join(PRESETS)}. Defaults below: {config.preset}.",
    )
    if options.gpu not in GPUS:
        raise unknown_name("gpu", options.gpu, sorted(GPUS))
    require_folder(options.html, "html")
    given = _given(words)
    if what not in PRESETS and given - {"html", "against"}:
        raise ValueError(f"--{min(given - {'html', 'against'})} is about a preset, and {what} has run: leave it out")
    account = _account(what, options, words)
    other = None if options.against is None else _account(options.against, options, words)
    write_page(options.html, account, other and difference(account, other, what, options.against))
    print(f"page {options.html}, {options.html.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0


def _given(words: list[str]) -> set[str]:
    """Names of the options in ``words``."""
    names = (word.split("=")[0].removeprefix("--").replace("_", "-") for word in words if word.startswith("--"))
    return {name.removeprefix("no-") for name in names}


def _account(what: str, options: InspectOptions, words: list[str]) -> dict[str, Any]:
    """The account of a preset, with ``options``, of a run folder or of a page."""
    if what in PRESETS:
        config = PRESETS[what]()
        chosen = {key: getattr(options, key) for key in SETTINGS}
        config = dataclasses.replace(config, mesh=options.mesh, **chosen)
        config.validate()
        if config.mesh_spec is not None and config.mesh_spec.pp > 1:
            raise ValueError(
                f"--mesh {options.mesh}: a preset's page has no pipeline yet; train it and show the run's page"
            )
        refuse_idle(config, words, Target.forecast(GPUS[options.gpu]))
        return preset_account(config, GPUS[options.gpu])
    path = Path(what)
    if path.is_dir():
        path = path / PAGE
        if not path.is_file():
            raise ValueError(f"{what} has no {PAGE}: give the folder of a run that got as far as its first steps")
    if not path.is_file():
        raise unknown_name("preset or run", what, PRESETS)
    return read_page(path)


def preset_account(config: TrainConfig, gpu: Gpu) -> dict[str, Any]:
    """The account of ``config``'s step, which is not run, on ``gpu``."""
    with simulated(config, gpu) as (program, groups):
        return account_of(program, config, gpu, groups, device=None)
