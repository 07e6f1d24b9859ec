"""Whether torchtitan can do our work, and the job configuration that asks it to."""

import importlib.metadata
import importlib.util
from operator import attrgetter
from typing import Any

import torch

from stepgraph.bench.train.titan.models import PEERS
from stepgraph.config.train import TrainConfig
from stepgraph.models import family_of

#: The release that this drives; others name their parts differently.
VERSION = "0.2.2"

NAME = "stepgraph_bench"  # of model and flavor in torchtitan's registry

#: What torchtitan's ``run_train.sh`` sets.
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_ACTIVATIONS = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "selective": {"mode": "selective", "selective_ac_option": "op"},
}
#: torch's names of the schedules of a pipeline, which torchtitan takes.
_PIPELINES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
#: torchtitan's name of its float8 converter, and the section of its options.
FLOAT8 = "quantize.linear.float8"
#: torchao's recipes, as torchtitan's users run them: the output head is left out.
_FP8 = {
    "tensorwise": {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True},
    "rowwise": {"recipe_name": "rowwise"},
    "rowwise-bf16-weight-gradients": {"recipe_name": "rowwise_with_gw_hp"},
}


def unavailable(config: TrainConfig, device: torch.device) -> str | None:
    """Why torchtitan cannot do the work of ``config`` here, in one line; None if it can."""
    if importlib.util.find_spec("torchtitan") is None:
        return f"not installed: pip install torchtitan=={VERSION}"
    installed = importlib.metadata.version("torchtitan")
    model, fp8 = config.model, config.fp8 != "off"
    if (peer := PEERS.get(family_of(model).name)) is None:
        return "it has no such model: choose a llama3 or deepseek-v3 preset"
    reasons = {
        f"{installed} is installed: pip install torchtitan=={VERSION}": installed != VERSION,
        "it needs a GPU": device.type != "cuda",
        "it cannot tie the head to the embedding: add --no-model.tie-embeddings": getattr(
            model, "tie_embeddings", False
        ),
        f"it has no counterpart to --memory {config.memory}: try none, selective or full": (
            config.memory not in _ACTIVATIONS
        ),
        "it has no Muon: drop --optimizer muon": config.optimizer != "adamw",
        "it reduces gradients in fp32 alone: add --reduce-dtype fp32": config.reduce_dtype != "fp32",
        "its float8 needs torchao: pip install torchao": fp8 and importlib.util.find_spec("torchao") is None,
    }
    reasons |= peer.unfit(model)
    return next((reason for reason, holds in reasons.items() if holds), None)


def rounded_weights(config: TrainConfig) -> bool:
    """Whether its parameters and AdamW state are in ``config.precision``: without shards, tensor and pipeline
    parallelism have no mixed precision there."""
    mesh = config.mesh_spec
    return mesh.dp_shard == 1 and (mesh.pp > 1 or mesh.tp > 1) and config.precision != "fp32"


def job_sections(config: TrainConfig, folder: str, balanced: bool = False) -> dict[str, dict[str, Any]]:
    """The fields of torchtitan's ``JobConfig`` that differ from its defaults, by section, dotted where it is nested.

    Mixed precision as `stepgraph train` has it under a mesh: fp32 at rest, gathered and computed in ``precision``,
    gradients reduced in fp32; but for `rounded_weights`. ``folder``: for what it writes. ``balanced``: every expert
    gets as many tokens.
    """
    mesh = config.mesh_spec
    # It cuts the batch of a rank into the microbatches of a pipeline, and else adds up batches of ranks.
    rows = config.batch_size * (config.accumulate if mesh.pp > 1 else 1)
    job = {
        "job": {"dump_folder": folder, "description": "stepgraph bench train"},
        "metrics": {"disable_color_printing": True},
        "model": {"name": NAME, "flavor": NAME, "converters": [] if config.fp8 == "off" else [FLOAT8]},
        "optimizer": {
            "name": "AdamW",
            "lr": config.lr,
            "beta1": config.betas[0],
            "beta2": config.betas[1],
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "implementation": "fused",
        },
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0, "total_steps": 10**6},  # constant
        "training": {
            "local_batch_size": rows,
            "global_batch_size": config.batch_size * config.accumulate * mesh.dp,
            "seq_len": config.seq_len,
            "max_norm": config.max_grad_norm,
            "steps": config.steps,
            "mixed_precision_param": _DTYPES[config.precision],
            "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": mesh.dp_replicate // (mesh.cp if mesh.dp_shard == 1 else 1),
            "data_parallel_shard_degree": max(1, mesh.dp_shard // mesh.cp),
            "context_parallel_degree": mesh.cp,
            "tensor_parallel_degree": mesh.tp,
            "expert_parallel_degree": mesh.ep,
            "pipeline_parallel_degree": mesh.pp,
            "fsdp_reshard_after_forward": {"auto": "default"}.get(config.reshard, config.reshard),
        },
        "checkpoint": {"enable": False},
        "comm": {"trace_buf_size": 0},  # no flight recorder
        "activation_checkpoint": _ACTIVATIONS[config.memory],
        "compile": {"enable": True, "components": ["model", "loss"]},
        "debug": {"seed": config.seed, "moe_force_load_balance": balanced},
    }
    if rounded_weights(config):
        job["training"]["dtype"] = _DTYPES[config.precision]
    if mesh.pp > 1:
        job["parallelism"] |= {
            "pipeline_parallel_schedule": _PIPELINES[config.pipeline_schedule],
            "pipeline_parallel_microbatch_size": config.batch_size,
        }
    if config.fp8 != "off":
        job[FLOAT8] = _FP8[config.fp8] | {"filter_fqns": ["output"]}
    return job


def job_config(config: TrainConfig, folder: str, balanced: bool = False) -> Any:
    """torchtitan's ``JobConfig`` with the fields of `job_sections`. Raises AttributeError for a field that it lacks."""
    from torchtitan.config import JobConfig

    job = JobConfig()
    for name, fields in job_sections(config, folder, balanced).items():
        section = attrgetter(name)(job)
        for field, value in fields.items():
            getattr(section, field)  # a new attribute would be ignored
            setattr(section, field, value)
    return job
