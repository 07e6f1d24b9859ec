"""``stepgraph inspect PRESET|RUN --ranks``: whether all ranks of a mesh have the same graph, and what differs if not.

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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS
from stepgraph.inspect.forecast.forecast import simulated
from stepgraph.parallel import MeshSpec, in_own_process
from stepgraph.run.saved.graphs import Captured, digest

log = logging.getLogger("stepgraph.passes")

#: Lines of a difference that are shown.
_MOST_LINES = 8


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
