"""``stepgraph inspect``: the page of a run or of a preset; and with ``--ranks`` whether all ranks of a mesh have
the same graph, and what differs if not.

Ranks with the same graph share the rewritten and compiled code of one of them, and collectives that all ranks launch in
the same order cannot deadlock. No rank needs to exist: one process after the other simulates each rank in a fake world.
"""

import difflib
import gzip
import itertools
import json
import logging
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from stepgraph.inspect.account.page import PAGE, read_page, write_page
from stepgraph.inspect.forecast.forecast import simulated, with_microbatches
from stepgraph.inspect.forecast.pipeline import simulated_stage
from stepgraph.parallel import MeshSpec, in_own_process
from stepgraph.passes import Target
from stepgraph.passes.waiting import Waiting
from stepgraph.run.saved.graphs import Captured, digest

log = logging.getLogger("stepgraph.passes")

#: Lines of a difference that are shown.
_MOST_LINES = 8


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
    about_runs = {"html", "ranks", "gpu"} if options.ranks else {"html"}
    if what not in PRESETS and named - about_runs:
        raise ValueError(f"{_flag(named - about_runs)} changes a preset, and {what} is a run: leave it out")
    waiting = Waiting(lambda line: print(line, file=sys.stderr, flush=True))
    if options.ranks:
        with waiting:
            return _ranks(what, config, options, words)
    with waiting:
        account = _account(what, config, options, words)
    try:
        write_page(options.html, account)
    except OSError as error:
        raise ValueError(f"html={options.html} cannot be written: {error.strerror}; use another file") from error
    print(f"page {options.html}, {options.html.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0


def _flag(names: set[str]) -> str:
    return "--" + min(names).replace("_", "-")


def _ranks(what: str, config: TrainConfig, options: InspectOptions, words: list[str]) -> int:
    """Compare the graphs of all ranks of a preset or a run; 1 where they differ."""
    if unused := given(words) & {"html", "text", "stage"}:
        raise ValueError(f"--ranks compares graphs and writes no page: leave {_flag(unused)} out")
    config = _checked(config, options.gpu, words) if what in PRESETS else _run_config(Path(what))
    graphs = graphs_of_ranks(config, options.gpu)
    print("\n".join(report(config.mesh_spec, graphs)))
    return int(len({graph.digest for graph in graphs}) > 1)


def _run_config(folder: Path) -> TrainConfig:
    if not folder.is_dir():
        raise unknown_name("preset or run", str(folder), PRESETS)
    return run_config(folder)


def _checked(config: TrainConfig, gpu: str, words: list[str]) -> TrainConfig:
    config = with_microbatches(config, words)
    config.validate()
    refuse_idle(config, words, Target.forecast(GPUS[gpu]))
    return config


def _account(what: str, config: TrainConfig, options: InspectOptions, words: list[str]) -> dict[str, Any]:
    """The account of a preset, with ``config``, of a run folder or of a page."""
    if what in PRESETS:
        return preset_account(_checked(config, options.gpu, words), GPUS[options.gpu], options.stage, options.text)
    path = Path(what)
    if path.is_dir():
        path = path / PAGE
        if not path.is_file():
            raise ValueError(f"{what} has no {PAGE}: use the folder of a run that has finished its first steps")
    if not path.is_file():
        if path.suffix == ".html":
            raise ValueError(f"{what} does not exist: use a page of stepgraph inspect, a run folder or a preset")
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


@dataclass(frozen=True)
class RankGraph:
    """The graphs of one rank's step after all passes. ``digest``: a hash of everything in them, constants and shapes
    included. ``text``: see `StepProgram.text`."""

    digest: str
    text: str


def graphs_of_ranks(config: TrainConfig, gpu: str) -> list[RankGraph]:
    """The graphs of every rank of ``config``'s mesh, as a step on ``gpu`` (a name in ``GPUS``) has them.

    Raises ``ValueError`` for a configuration that cannot be right, has one rank, or is a pipeline.
    """
    config.validate()
    spec = config.mesh_spec
    if spec is None or spec.size == 1:
        raise ValueError("--ranks compares the graphs of several ranks, and there is one: add --mesh fsdp=2")
    if spec.pp > 1:
        raise ValueError(
            f"--ranks: mesh {config.mesh} is a pipeline, whose stages have graphs of their own: leave pp out"
        )
    # DTensor keeps what it knows of a mesh beyond the world's end: a process for each rank, with one import for all.
    multiprocessing.set_forkserver_preload([__name__])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank.json.gz"
        for rank in range(spec.size):
            log.info("the graph of rank %d of %d", rank, spec.size)
            in_own_process(_rank, (rank, config, gpu, file), "forkserver")
            record = json.loads(gzip.decompress(file.read_bytes()))
            if "error" in record:
                raise ValueError(record["error"])
            found.append(RankGraph(**record))
    return found


def _rank(rank: int, config: TrainConfig, gpu: str, file: Path) -> None:
    try:
        with simulated(config, GPUS[gpu], rank) as (program, _groups):
            record = {"digest": digest(program, captured=Captured.of(program)), "text": program.text()}
    except ValueError as error:
        record = {"error": str(error)}
    file.write_bytes(gzip.compress(json.dumps(record).encode()))


def report(spec: MeshSpec, graphs: Sequence[RankGraph]) -> list[str]:
    """Whether the ranks' graphs agree, what differs and why, as lines for a terminal. ``graphs``: by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, graph in enumerate(graphs):
        ranks.setdefault(graph.digest, []).append(rank)
    first, *others = ranks.values()
    nodes = [len(graphs[same[0]].text.splitlines()) for same in ranks.values()]
    if not others:
        return [
            f"mesh {spec}: all {len(graphs)} ranks have one graph of {nodes[0]:,} lines, which one of them compiles"
        ]
    lines = [f"mesh {spec}: {len(graphs)} ranks have {len(ranks)} graphs, each compiled separately"]
    lines += [f"  {_listed(same)}: {n:,} lines" for same, n in zip(ranks.values(), nodes, strict=True)]
    lines.append(f"why: {_reason(spec, list(ranks.values()))}")
    for same in others:
        lines.append(f"{_listed(same)} compared with {_listed(first)}:")
        lines += _difference(graphs[first[0]].text, graphs[same[0]].text)
    return lines


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def places(spec: MeshSpec) -> list[Mapping[str, int]]:
    """The coordinates of each rank along each axis above 1, by rank: the last axis varies fastest."""
    every = itertools.product(*(range(size) for size in spec.sizes.values()))
    return [{a: p for a, p in zip(spec.sizes, place, strict=True) if spec.sizes[a] > 1} for place in every]


def _reason(spec: MeshSpec, classes: Sequence[Sequence[int]]) -> str:
    """The fewest axes of the mesh whose coordinates determine the graph of a rank, and the cause."""
    found = places(spec)
    of = {rank: i for i, ranks in enumerate(classes) for rank in ranks}
    axes = list(found[0])
    fewer = (chosen for n in range(1, len(axes)) for chosen in itertools.combinations(axes, n))
    for chosen in [*fewer, *([tuple(axes)] if len(axes) == 1 else [])]:
        if len({(of[rank], *(place[axis] for axis in chosen)) for rank, place in enumerate(found)}) == math.prod(
            spec.sizes[axis] for axis in chosen
        ):
            what = f"the graph depends on the coordinate along {' and '.join(chosen)}"
            break
    else:
        what = "the graph depends on the rank, not on the coordinate along any one axis"
    return f"{what}: the model computed with it in Python during capture; as a tensor it would be an input of the graph"


def _difference(a: str, b: str) -> Iterator[str]:
    """The first lines that only one text has, and the number of the rest."""
    one, other = a.splitlines(), b.splitlines()
    if len(one) == len(other):  # line by line: a search for the longest match takes minutes for long graphs
        pairs = [(x, y) for x, y in zip(one, other, strict=True) if x != y]
        changed = [line for x, y in pairs for line in (f"- {x.strip()}", f"+ {y.strip()}")]
    else:
        changed = [
            line for line in difflib.unified_diff(one, other, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")
        ]
    if not changed:
        yield "  the texts are equal: a constant differs, or something that the text leaves out, such as strides"
    yield from (f"  {line[:300]}" for line in changed[:_MOST_LINES])
    if len(changed) > _MOST_LINES:
        yield f"  and {len(changed) - _MOST_LINES:,} more lines"
