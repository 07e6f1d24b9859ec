"""torchtitan as a provider of ``stepgraph bench train``: its public ``Trainer``, configured for our work.

torchtitan is imported where it is used, so that everything else works without it. What it is given: a job
configuration, model arguments with the preset's dimensions, our tokens and our initial weights, and a metrics processor
that reads a loss only when it is asked for one. All else is torchtitan's own.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph.config.train import TrainConfig
from stepgraph.models import Llama3Config, family_of
from stepgraph.models.deepseek_v3 import LATENT_EPS, DeepSeekV3Config
from stepgraph.models.init import Part
from stepgraph.models.rope import rope_tables


@dataclass(frozen=True)
class Origin:
    """Where a parameter of torchtitan's is in our model: in the parameter ``name``, from ``first`` on in its dimension
    1 (of experts, whose gate and up projections are one parameter here). ``heads``: its rows are heads of which RoPE
    rotates neighbours there and halves here."""

    name: str
    first: int = 0
    heads: bool = False


@dataclass(frozen=True)
class Peer:
    """A family in torchtitan. ``module``: that has it; ``arguments(config)``: its model arguments; ``origins(config)``:
    its matrices, by name below a block; ``unfit(config)``: reason -> whether it is why a shape cannot be built there;
    ``finish(model, config)``: gives the model what is neither argument nor parameter."""

    module: str
    arguments: Callable[[Any], Any]
    origins: Callable[[Any], Mapping[str, Origin]]
    unfit: Callable[[Any], dict[str, bool]] = lambda config: {}
    finish: Callable[[nn.Module, Any], None] = lambda model, config: None


#: What both families have.
_OUTER = {"tok_embeddings.weight": Origin("embed.weight"), "output.weight": Origin("head.weight")}


def _swiglu(theirs: str, ours: str) -> dict[str, Origin]:
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return {f"{theirs}.{there}.weight": Origin(f"{ours}.{here}.weight") for there, here in names.items()}


def llama3_sizes(model: Llama3Config) -> dict[str, Any]:
    """The fields of torchtitan's ``TransformerModelArgs`` for a model of the same dimensions.

    It derives the width of the feed-forward from ``dim``: ``int(ffn_dim_multiplier * int(8 * dim / 3))``, rounded up to
    a multiple of ``multiple_of``. A multiplier that lands below ``ffn_dim`` and that as the multiple give it exactly.
    """
    scaling = model.rope_scaling
    same = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta")
    return {name: getattr(model, name) for name in same} | {
        "multiple_of": model.ffn_dim,
        "ffn_dim_multiplier": 0.5 * model.ffn_dim / int(8 * model.dim / 3),
        "rope_scaling_args": {
            "scaling_factor": scaling.factor if scaling else 1.0,
            "low_freq_factor": scaling.low_freq_factor if scaling else 1.0,
            "high_freq_factor": scaling.high_freq_factor if scaling else 4.0,
            "original_max_position_embeddings": scaling.original_max_seq_len if scaling else 8192,
        },
        "depth_init": False,
    }


def _llama3_arguments(model: Llama3Config) -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    sizes = llama3_sizes(model)
    return TransformerModelArgs(**sizes | {"rope_scaling_args": RoPEScalingArgs(**sizes["rope_scaling_args"])})


def _llama3_origins(_: Llama3Config) -> dict[str, Origin]:
    attention = {
        f"attention.{there}.weight": Origin(f"attn.{here}.weight", heads=there in ("wq", "wk"))
        for there, here in {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}.items()
    }
    return _OUTER | attention | _swiglu("feed_forward", "mlp")


def deepseek_v3_sizes(model: DeepSeekV3Config) -> dict[str, Any]:
    """The fields of torchtitan's ``DeepSeekV3ModelArgs`` for a model of the same dimensions, attention by SDPA."""
    moe = model.moe
    grouped = {"num_expert_groups": moe.n_groups, "num_limited_groups": moe.top_groups} if moe.n_groups > 1 else {}
    same = ("dim", "n_layers", "n_dense_layers", "n_heads", "vocab_size", "norm_eps", "rope_theta", "kv_lora_rank")
    same += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: getattr(model, name) for name in same} | {
        "inter_dim": model.ffn_dim,
        "moe_inter_dim": moe.ffn_dim,
        "q_lora_rank": model.q_lora_rank or 0,
        "attn_type": "sdpa",
        "attn_mask_type": "causal",
        "moe_args": {
            "num_experts": moe.n_experts,
            "num_shared_experts": moe.n_shared,
            "top_k": moe.top_k,
            "score_func": moe.scoring,
            "route_norm": moe.normalize,
            "route_scale": moe.scale,
            "score_before_experts": False,
            "load_balance_coeff": moe.balance_rate if moe.selection_bias and moe.balance_rate else None,
            **grouped,
        },
    }


def _deepseek_v3_arguments(model: DeepSeekV3Config) -> Any:
    from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
    from torchtitan.models.moe import MoEArgs

    sizes = deepseek_v3_sizes(model)
    return DeepSeekV3ModelArgs(**sizes | {"moe_args": MoEArgs(**sizes["moe_args"])})


def _deepseek_v3_origins(model: DeepSeekV3Config) -> dict[str, Origin]:
    attention = {"wq": "q_proj", "wq_a": "q_a_proj", "wq_b": "q_b_proj"}
    attention |= {"wkv_a": "kv_a_proj", "wkv_b": "kv_b_proj", "wo": "o_proj"}
    experts = "mlp.experts.gate_up_proj.weight"
    return (
        _OUTER
        | {f"attention.{there}.weight": Origin(f"attn.{here}.weight") for there, here in attention.items()}
        | _swiglu("feed_forward", "mlp")
        | _swiglu("moe.shared_experts", "mlp.shared")
        | {
            "moe.router.gate.weight": Origin("mlp.router.weight"),
            "moe.experts.w1": Origin(experts),
            "moe.experts.w2": Origin("mlp.experts.down_proj.weight"),
            "moe.experts.w3": Origin(experts, first=model.moe.ffn_dim),
        }
    )


def _deepseek_v3_unfit(model: DeepSeekV3Config) -> dict[str, bool]:
    by_one = model.moe.scoring == "softmax" and model.moe.n_groups > 1
    return {
        "it ranks groups by their best two scores, softmax here by the best one: add --model.moe.n-groups 1": by_one,
        "it has no balance loss of sequences: add --model.moe.balance-loss 0": model.moe.balance_loss > 0,
    }


def _deepseek_v3_finish(model: nn.Module, config: DeepSeekV3Config) -> None:
    """Our rotations, scale of scores and eps of norms. It stretches RoPE only in sequences longer than the original,
    gives norms of latents the others' eps, and the last norm torch's own."""
    cos, signed_sin = rope_tables(
        model.freqs_cis.shape[0], config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    )
    half = config.qk_rope_head_dim // 2
    model.freqs_cis.copy_(torch.complex(cos[:, 0, :half], signed_sin[:, 0, half:]))
    yarn = config.rope_scaling
    for name, module in model.named_modules():
        if hasattr(module, "softmax_scale"):
            module.softmax_scale = config.qk_head_dim**-0.5 * (1.0 if yarn is None else yarn.score_scale)
        if isinstance(module, nn.RMSNorm):
            module.eps = LATENT_EPS if name.endswith(("q_norm", "kv_norm")) else config.norm_eps


#: By the name of our family.
PEERS = {
    "llama3": Peer("torchtitan.models.llama3", _llama3_arguments, _llama3_origins),
    "deepseek_v3": Peer(
        "torchtitan.models.deepseek_v3",
        _deepseek_v3_arguments,
        _deepseek_v3_origins,
        _deepseek_v3_unfit,
        _deepseek_v3_finish,
    ),
}


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
        "it reduces gradients only in fp32: add --reduce-dtype fp32": config.reduce_dtype != "fp32",
        "its float8 needs torchao: pip install torchao": fp8 and importlib.util.find_spec("torchao") is None,
    }
    reasons |= peer.unfit(model)
    return next((reason for reason, holds in reasons.items() if holds), None)


def rounded_weights(config: TrainConfig) -> bool:
    """Whether its parameters and AdamW state are in ``config.precision``: without shards, it has no mixed precision."""
    mesh = config.mesh_spec
    return mesh.dp_shard == 1 and (mesh.pp > 1 or mesh.tp > 1) and config.precision != "fp32"


def job_sections(config: TrainConfig, folder: str, balanced: bool = False) -> dict[str, dict[str, Any]]:
    """The fields of torchtitan's ``JobConfig`` that differ from its defaults, by section, dotted where it is nested.

    Mixed precision as `stepgraph train` has it under a mesh: fp32 at rest, gathered and computed in ``precision``,
    gradients reduced in fp32; except for `rounded_weights`. ``folder``: for its output.
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


Region = tuple[tuple[int, int], ...]


@torch.no_grad()
def fill(model: nn.Module, config: TrainConfig) -> None:
    """Gives torchtitan's ``model``, or a stage of it, the weights that ours starts from, each rank its part."""
    family = family_of(config.model)
    peer = PEERS[family.name]
    with torch.device("meta"):
        ours = family.model(config.model)
    shapes = {name: param.shape for name, param in ours.named_parameters()}
    origins = peer.origins(config.model)
    for full_name, param in model.named_parameters():
        name = re.sub(r"\._orig_mod|\._checkpoint_wrapped_module", "", full_name)  # torch.compile, recomputation
        layer, name = re.fullmatch(r"(layers\.\d+\.)?(.+)", name).groups(default="")
        if param.ndim == 1:  # a norm, one in both
            continue
        origin = origins[name]
        local, our_name = param.to_local() if isinstance(param, DTensor) else param, layer + origin.name
        region = list(held(param))
        if origin.first:
            region[1] = tuple(place + origin.first for place in region[1])
        head = config.model.head_dim if origin.heads else 1
        (start, stop), *others = region
        whole_heads = (start // head * head, -(-stop // head) * head)
        drawn = torch.empty(whole_heads[1] - whole_heads[0], *(last - first for first, last in others))
        ours.init_weights(config.seed, {our_name: Part(drawn, shapes[our_name], (whole_heads, *others))})
        if head > 1:  # RoPE rotates neighbours there, halves of a head here
            drawn = drawn.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
        drawn = drawn[start - whole_heads[0] :][: local.shape[0]]
        local.copy_(drawn.bfloat16() if config.precision == "bf16" else drawn)
    peer.finish(model, config.model)


def held(param: torch.Tensor) -> Region:
    """(start, stop) in each dimension of the part of ``param`` that this rank holds: the last axis of its mesh, of
    tensor or expert parallelism, splits it first, and FSDP chunks what that leaves."""
    region = [(0, size) for size in param.shape]
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        splits = zip(param.placements, mesh.get_coordinate(), mesh.shape, strict=True)
        for placement, place, ranks in reversed(list(splits)):
            if placement.is_replicate():
                continue
            start, stop = region[placement.dim]
            chunk = -(-(stop - start) // ranks)
            region[placement.dim] = (min(stop, start + place * chunk), min(stop, start + (place + 1) * chunk))
    return tuple(region)


Batch = Callable[[int], dict[str, torch.Tensor]]  # data-parallel rank -> tokens and targets


def register(config: TrainConfig, batch: Batch) -> None:
    """Adds our model and data to torchtitan's registry, under ``NAME``."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.protocols.train_spec import register_train_spec

    class SameBatch(BaseDataLoader):
        """One batch again and again, in parts of as many rows as the trainer takes at once: ``({"input": (B, T)},
        labels (B, T))`` on the CPU."""

        def __init__(self, dp_rank: int, job_config: Any, **_: Any):
            drawn, rows = batch(dp_rank), job_config.training.local_batch_size
            self.parts = list(zip(drawn["tokens"].split(rows), drawn["targets"].split(rows), strict=True))

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                for tokens, targets in self.parts:
                    yield {"input": tokens}, targets

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class LastLoss(MetricsProcessor):
        """Reads results only in a step that asks for them, and prints nothing."""

        wanted, loss = False, None

        def should_log(self, step: int) -> bool:
            return self.wanted

        def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
            self.loss = float(global_avg_loss)

    def build_loss_fn(*args: Any, **options: Any) -> Callable:
        """The sum over tokens divided by the step's number of tokens, as without pipelines: with one, release 0.2.2
        divides the loss that it reports, but not the one that it differentiates."""
        summed = spec_loss(*args, **options)
        return lambda prediction, labels: summed(prediction, labels) / config.tokens_per_step

    peer = PEERS[family_of(config.model).name]
    spec = importlib.import_module(peer.module).get_train_spec()
    spec.model_args = {NAME: peer.arguments(config.model)}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = SameBatch
    spec.build_metrics_processor_fn = lambda job, dims, args: LastLoss(job, dims)
    spec_loss = spec.build_loss_fn
    if config.mesh_spec.pp > 1:
        spec.build_loss_fn = build_loss_fn
    register_train_spec(NAME, spec)


class Titan:
    """A `Training` by torchtitan's ``Trainer``."""

    capture_s: float | None = None
    compile_s: float | None = None
    passes: list[str] | None = None

    def __init__(self, config: TrainConfig, batch: Batch, folder: str, balanced: bool):
        self.tokens_per_step = config.tokens_per_step
        from torchtitan.tools.logging import init_logger
        from torchtitan.train import Trainer

        start = time.perf_counter()
        init_logger()
        register(config, batch)
        self.trainer = Trainer(job_config(config, folder, balanced))
        for part in self.trainer.model_parts:
            fill(part, config)
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)
        self.build_s = time.perf_counter() - start

    def step(self, read: bool = False) -> float | None:
        """As one turn of the loop in ``Trainer.train``."""
        trainer, metrics = self.trainer, self.trainer.metrics_processor
        metrics.wanted = read
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(self.batches)
        return self._loss() if read else None

    def _loss(self) -> float:
        """The loss of the whole mesh, which in a pipeline only ranks with the last stage have."""
        trainer, loss = self.trainer, self.trainer.metrics_processor.loss
        if not trainer.parallel_dims.pp_enabled:
            return loss
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss if trainer.pp_has_last_stage else None)
        return next(loss for loss in losses if loss is not None) * self.tokens_per_step  # see build_loss_fn


@contextlib.contextmanager
def started(config: TrainConfig, batch: Batch, balanced: bool = False) -> Iterator[Titan]:
    """torchtitan's trainer over the processes that were started; it opens and closes the process groups."""
    with tempfile.TemporaryDirectory(prefix="stepgraph-bench-", ignore_cleanup_errors=True) as folder:
        titan = Titan(config, batch, folder, balanced)
        try:
            yield titan
        finally:
            titan.trainer.close()
            torch.distributed.destroy_process_group()
