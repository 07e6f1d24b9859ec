"""The pipelines: which passes run, in which order. Read this list first."""

from collections.abc import Callable

from stepgraph.passes import cleanup, cuda_graph, inductor, inplace, recompute  # noqa: F401  (they register themselves)
from stepgraph.passes.contract import PASSES, Pass, get

#: Every pass in the order it runs. `exact` is this list without the `numerics` tier.
ORDER = (
    "fold_constants",  # literals of the model become constants on their device
    "remove_noop_views",  # t(t(x)), view to the same shape
    "dedupe_casts",  # one cast of each tensor per phase
    "dead_code",  # what nothing reads
    "recompute",  # the memory policy
    "inplace_update",  # optimizer and clipping without copies
    "inductor",  # numerics: forward and backward as fused kernels
    "cuda_graph",  # the whole step as one launch
)


def exact() -> list[Pass]:
    """Passes that leave every result bitwise equal to eager."""
    return [PASSES[name] for name in ORDER if PASSES[name].tier == "exact"]


def default() -> list[Pass]:
    """All passes."""
    return [PASSES[name] for name in ORDER]


PIPELINES: dict[str, Callable[[], list[Pass]]] = {"exact": exact, "default": default}


def configured(
    pipeline: str = "default", *, memory: str = "none", inductor: str = "full", cuda_graph: bool = True
) -> list[Pass]:
    """A pipeline with the trainer's options applied.

    ``memory``: a policy as `recompute.parse_policy` reads it. ``inductor``: ``full`` or ``off``.
    """
    if pipeline not in PIPELINES:
        raise ValueError(f"unknown pipeline {pipeline!r}; allowed: {', '.join(map(repr, PIPELINES))}")
    if inductor not in ("full", "off"):
        raise ValueError(f"unknown inductor mode {inductor!r}; allowed: full, off")
    chosen = []
    for p in PIPELINES[pipeline]():
        if p.name == "recompute":
            p = get("recompute", **vars(recompute.parse_policy(memory)))
        if (p.name == "inductor" and inductor == "off") or (p.name == "cuda_graph" and not cuda_graph):
            continue
        chosen.append(p)
    return chosen
