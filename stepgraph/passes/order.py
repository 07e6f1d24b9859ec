"""The pipelines: which passes run, in which order. Read this list first."""

from collections.abc import Callable
from dataclasses import replace

import stepgraph.passes.cleanup.tidy
import stepgraph.passes.comm.async_tensor_parallel
import stepgraph.passes.comm.bucket
import stepgraph.passes.comm.copy_engines
import stepgraph.passes.comm.overlap
import stepgraph.passes.comm.unshard
import stepgraph.passes.compile.cuda_graph
import stepgraph.passes.compile.inductor
import stepgraph.passes.embedding.gradient
import stepgraph.passes.loss.fuse
import stepgraph.passes.norm.fuse
import stepgraph.passes.optimizer.expand
import stepgraph.passes.optimizer.inplace  # noqa: F401  (passes register themselves)
from stepgraph.passes.contract import PASSES, Pass
from stepgraph.passes.memory import recompute

#: Every pass in the order it runs. `exact` is this list without the `numerics` tier.
ORDER = (
    "fold_constants",  # literals of the model become constants on their device
    "remove_noop_views",  # t(t(x)), view to the same shape
    "dedupe_casts",  # one cast of each tensor per phase
    "dead_code",  # what nothing reads
    "dedupe_unshards",  # one gather of each parameter per forward or backward
    "recompute",  # the memory policy
    "inplace_update",  # optimizer and clipping without copies
    "fuse_norm",  # numerics: each norm by our kernels, Inductor or eager
    "fuse_loss",  # numerics: cross entropy with its gradient, written over the logits
    "embedding_gradient",  # numerics: gradients of tables by a kernel that repeats itself
    "expand_optimizer",  # numerics: clipping and AdamW as arithmetic, for Inductor
    "reshard_after_forward",  # gather parameters again in backward
    "bucket_collectives",  # one collective for each region of the model
    "bucket_all_reduces",  # numerics: those of more than two ranks
    "overlap",  # collectives beside compute
    "async_tensor_parallel",  # numerics: products in a pipeline with collectives of activations
    "copy_engines",  # numerics: FSDP's gathers and reductions without kernels of NCCL
    "inductor",  # numerics: forward, backward and update as fused kernels
    "cuda_graph",  # the whole step as one launch
)

#: Passes of `ORDER` that run only where they are asked for.
OPT_IN = ("async_tensor_parallel", "copy_engines")


def exact() -> list[Pass]:
    """Passes that leave every result bitwise equal to eager."""
    return [p for p in default() if p.tier == "exact"]


def default() -> list[Pass]:
    """All passes but `OPT_IN`, each skipped where it cannot run."""
    return [p for p in _all() if p.name not in OPT_IN]


def _all() -> list[Pass]:
    return [replace(PASSES[name], optional=True) for name in ORDER]


PIPELINES: dict[str, Callable[[], list[Pass]]] = {"exact": exact, "default": default}


def configured(
    pipeline: str = "default",
    *,
    memory: str = "none",
    inductor: str = "full",
    norm: str = "auto",
    reshard: str = "auto",
    async_tp: bool = False,
    copy_engines: bool = False,
    cuda_graph: bool = True,
) -> list[Pass]:
    """A pipeline with the trainer's options applied.

    ``memory``: a policy as `recompute.parse_policy` reads it. ``inductor``: ``full``, ``regional`` (compile norms,
    rotations, gated products and FlexAttention, and leave the rest as it is) or ``off``. ``norm``: ``auto``,
    ``kernel``, ``inductor`` or ``eager`` (see `fuse_norm`). ``reshard``: ``auto``, ``always`` or ``never`` gather
    parameters again in backward. ``async_tp``: overlap collectives of tensor parallelism with matrix products.
    ``copy_engines``: gather parameters and reduce gradients by the GPUs' copy engines.
    """
    if pipeline not in PIPELINES:
        raise ValueError(f"unknown pipeline {pipeline!r}; allowed: {', '.join(map(repr, PIPELINES))}")
    if inductor not in ("full", "regional", "off"):
        raise ValueError(f"unknown inductor mode {inductor!r}; allowed: full, regional, off")
    if pipeline == "exact" and norm != "auto":
        raise ValueError(f"norm={norm} with pipeline 'exact', which leaves norms to eager; use pipeline 'default'")
    if norm == "inductor" and inductor == "off":
        raise ValueError("norm=inductor with inductor=off; allowed then: norm=auto, kernel or eager")
    opted = {"async_tensor_parallel": ("async_tp", async_tp), "copy_engines": ("copy_engines", copy_engines)}
    for option, wanted in opted.values():
        if pipeline == "exact" and wanted:
            raise ValueError(f"{option} with pipeline 'exact': it adds in another order; use pipeline 'default'")
    options = {
        "recompute": vars(recompute.parse_policy(memory)),
        "fuse_norm": {"choice": norm, "compiled": inductor != "off"},
        "inductor": {"mode": inductor},
        "reshard_after_forward": {"policy": reshard},
    }
    dropped = {"expand_optimizer": inductor != "full", "inductor": inductor == "off", "cuda_graph": not cuda_graph}
    names = {p.name for p in PIPELINES[pipeline]()} | {name for name, (_, wanted) in opted.items() if wanted}
    chosen = [p for p in _all() if p.name in names and not dropped.get(p.name)]
    return [p.with_options(**options.get(p.name, {})) for p in chosen]
