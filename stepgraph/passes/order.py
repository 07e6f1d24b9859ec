"""Which passes run, in which order. Read this list first."""

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepgraph.options import StepOptions, choices
from stepgraph.passes.contract import PASSES, Pass
from stepgraph.passes.options import check_step

# Passes register themselves when their modules, in the folders next to this file, are imported.
for _found in pkgutil.walk_packages([str(Path(__file__).parent)], "stepgraph.passes."):
    if _found.name.count(".") > 2:
        importlib.import_module(_found.name)

#: Every pass in the order it runs. `exact` is this list without the `numerics` tier.
ORDER = (
    "fold_constants",  # literals of the model become constants on their device
    "remove_noop_views",  # t(t(x)), view to the same shape
    "dedupe_casts",  # one cast of each tensor per phase
    "false_masks",  # masks that hide nothing, clamps that hold
    "dead_code",  # what nothing reads
    "index_gradients",  # gradients of an indexing without checking the indices again
    "contiguous_rows",  # numerics: rows that lie channel by channel made contiguous where they begin
    "dedupe_unshards",  # one gather of each parameter per forward or backward
    "fuse_experts",  # numerics: experts of other libraries in our kernels
    "weight_experts",  # numerics: experts weighted before their last product
    "expert_swiglu",  # numerics: SwiGLU of the rows of experts that are in use
    "lora_experts",  # numerics: low-rank adapters of experts' weights as products of rows
    "unread_rows",  # no zeros after expert rows where nothing reads them
    "fp8_experts",  # numerics: products of expert rows in fp8
    "exchange_fp8",  # numerics: experts' tokens travel in fp8
    "bitsandbytes_4bit",  # numerics: weights that bitsandbytes holds in 4 bits in our kernel
    "fp8_matmul",  # numerics: products of linear layers in fp8
    "gather_fp8",  # numerics: FSDP's gathers of weights as the fp8 that products read
    "lora",  # numerics: products of low-rank adapters joined, and added by the base layer's
    "contract_products",  # numerics: sums of broadcast products as matrix products
    "fuse_attention",  # numerics: attention written out as products by fused kernels
    "attention_windows",  # numerics: sliding windows by kernels that skip what the mask hides
    "attention",  # numerics: each attention by the fastest backend
    "tile_sequence",  # numerics: what treats tokens one by one, in tiles of the sequence
    "recompute",  # the memory policy
    "orthogonalize",  # numerics: Muon's products over several matrices, and half of symmetric ones
    "inplace_update",  # optimizer and clipping without copies
    "offload_optimizer",  # the optimizer's state on the host, updates in parts
    "modulated_norm",  # numerics: norms that each sequence scales and shifts, with gates, in our kernel
    "fuse_norm",  # numerics: each norm in our kernels, Inductor or eager
    "fuse_loss",  # numerics: cross entropy with its gradient, written over the logits
    "embedding_gradient",  # numerics: gradients of tables by a kernel that repeats itself
    "expand_optimizer",  # numerics: clipping and AdamW as arithmetic, for Inductor
    "fuse_updates",  # numerics: what other optimizers compute element by element, for Inductor
    "fit_memory",  # a peak of memory, and modules that offload
    "gather_once",  # one gather of each parameter for all microbatches of a pipeline
    "reduce_once",  # numerics: one reduction of each gradient for all of them
    "reshard_after_forward",  # gather parameters again in backward
    "bucket_collectives",  # one collective for each region of the model
    "bucket_all_reduces",  # numerics: all-reduces of more than two ranks
    "overlap_experts",  # experts' tokens travel during compute
    "overlap",  # collectives of parameters during compute
    "async_tensor_parallel",  # numerics: products in a pipeline with collectives of activations
    "product_epilogues",  # numerics: activations inside products by QuACK
    "gelu_kernels",  # numerics: GELU between products in our kernels, with the bias's gradient
    "concat_in_place",  # concatenations whose parts Inductor writes where they lie
    "copy_engines",  # numerics: FSDP's gathers and reductions without kernels of NCCL
    "tune_products",  # numerics: large products by the fastest of cuBLASLt's algorithms
    "tag_regions",  # what regional Inductor compiles
    "rematerialize",  # what a compiler's kernels carry from forward to backward
    "inductor",  # numerics: forward, backward and update as fused kernels
    "cuda_graph",  # the whole step as one launch
)


def chosen(options: StepOptions) -> list[Pass]:
    """The passes that ``options`` ask for, in order. Raises ``ValueError`` for options that cannot be right.

    The same list serves a run and a forecast: `runner.resolve` fits it to a target.
    """
    check_step(options)
    found = []
    for p in (PASSES[name] for name in ORDER):
        own = p.from_options(options)
        wanted = own is not None and (options.passes == "default" or p.tier == "exact")
        if wanted and p.name not in options.disable_pass:
            found.append(replace(p, optional=True).with_options(**own))
    return [p for p in found if p.serves in (None, *(other.name for other in found))]


#: Names of ready-made lists: the values of ``StepOptions.passes``.
NAMED = choices(StepOptions)["passes"]


def configured(passes: str = "default", **options: Any) -> list[Pass]:
    """The passes of ``StepOptions(passes, **options)``."""
    return chosen(StepOptions(passes, **options))


def exact() -> list[Pass]:
    """The passes that leave every result bitwise equal to eager."""
    return configured("exact")


def default() -> list[Pass]:
    """All passes except opt-in ones; each is skipped where it cannot run."""
    return configured("default")
