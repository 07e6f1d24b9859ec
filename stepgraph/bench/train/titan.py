"""torchtitan's Llama 3 as a provider of ``stepgraph bench train``: its public ``Trainer``, told to do our work.

torchtitan is imported where it is used, so that everything else works without it. What it is given: a job
configuration, model arguments with the preset's dimensions, our tokens and our initial weights, and a metrics processor
that reads a loss only when it is asked for one. The model, its parallelism, its compilation, its optimizer and its step
are torchtitan's own.
"""

import contextlib
import importlib.metadata
import importlib.util
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph.config.train import TrainConfig
from stepgraph.models import Llama3, Llama3Config, family_of
from stepgraph.models.init import Part

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


def unavailable(config: TrainConfig, device: torch.device) -> str | None:
    """Why torchtitan cannot do the work of ``config`` here, in one line; None if it can."""
    if importlib.util.find_spec("torchtitan") is None:
        return f"not installed: pip install torchtitan=={VERSION}"
    installed = importlib.metadata.version("torchtitan")
    model = config.model
    reasons = {
        f"{installed} is installed: pip install torchtitan=={VERSION}": installed != VERSION,
        "it needs a GPU": device.type != "cuda",
        "it has no such model: choose a llama3 preset": family_of(model).name != "llama3",
        "it cannot tie the head to the embedding: add --model.no-tie-embeddings": getattr(
            model, "tie_embeddings", False
        ),
        f"it has no counterpart to --memory {config.memory}: try none, selective or full": (
            config.memory not in _ACTIVATIONS
        ),
        "it reduces gradients in fp32 alone: add --reduce-dtype fp32": config.reduce_dtype != "fp32",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def job_sections(config: TrainConfig, folder: str) -> dict[str, dict[str, Any]]:
    """The fields of torchtitan's ``JobConfig`` that differ from its defaults, by section.

    Mixed precision as `stepgraph train` has it under a mesh: fp32 at rest, gathered and computed in ``precision``,
    gradients reduced in fp32. ``folder``: for what it writes.
    """
    mesh = config.mesh_spec
    return {
        "job": {"dump_folder": folder, "description": "stepgraph bench train"},
        "metrics": {"disable_color_printing": True},
        "model": {"name": NAME, "flavor": NAME},
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
            "local_batch_size": config.batch_size,
            "seq_len": config.seq_len,
            "max_norm": config.max_grad_norm,
            "steps": config.steps,
            "mixed_precision_param": _DTYPES[config.precision],
            "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": mesh.dp_replicate,
            "data_parallel_shard_degree": mesh.dp_shard,
            "tensor_parallel_degree": mesh.tp,
            "fsdp_reshard_after_forward": {"auto": "default"}.get(config.reshard, config.reshard),
        },
        "checkpoint": {"enable": False},
        "comm": {"trace_buf_size": 0},  # no flight recorder
        "activation_checkpoint": _ACTIVATIONS[config.memory],
        "compile": {"enable": True, "components": ["model", "loss"]},
        "debug": {"seed": config.seed},
    }


def model_sizes(model: Llama3Config) -> dict[str, Any]:
    """The fields of torchtitan's ``TransformerModelArgs`` for a model of the same dimensions.

    It derives the width of the feed-forward from ``dim``: ``int(ffn_dim_multiplier * int(8 * dim / 3))``, rounded up to
    a multiple of ``multiple_of``. A multiplier that lands below ``ffn_dim`` and that as the multiple give it exactly.
    """
    scaling = model.rope_scaling
    return {
        "dim": model.dim,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": model.ffn_dim,
        "ffn_dim_multiplier": 0.5 * model.ffn_dim / int(8 * model.dim / 3),
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling_args": {
            "scaling_factor": scaling.factor if scaling else 1.0,
            "low_freq_factor": scaling.low_freq_factor if scaling else 1.0,
            "high_freq_factor": scaling.high_freq_factor if scaling else 4.0,
            "original_max_position_embeddings": scaling.original_max_seq_len if scaling else 8192,
        },
        "depth_init": False,
    }


Batch = Callable[[int], dict[str, torch.Tensor]]  # data-parallel rank -> tokens and targets


def register(config: TrainConfig, batch: Batch) -> None:
    """Adds our model and data to torchtitan's registry, under ``NAME``."""
    import torchtitan.models.llama3 as llama3
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.llama3.llama3.args import RoPEScalingArgs
    from torchtitan.protocols.train_spec import register_train_spec

    class SameBatch(BaseDataLoader):
        """One batch again and again: ``({"input": (B, T)}, labels (B, T))`` on the CPU."""

        def __init__(self, dp_rank: int, **_: Any):
            drawn = batch(dp_rank)
            self.tokens, self.targets = drawn["tokens"], drawn["targets"]

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                yield {"input": self.tokens}, self.targets

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

    sizes = model_sizes(config.model)
    sizes["rope_scaling_args"] = RoPEScalingArgs(**sizes["rope_scaling_args"])
    spec = llama3.get_train_spec()
    spec.model_args = {NAME: llama3.TransformerModelArgs(**sizes)}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = SameBatch
    spec.build_metrics_processor_fn = lambda job, dims, args: LastLoss(job, dims)
    register_train_spec(NAME, spec)


#: torchtitan's names and ours, and the dimension that its tensor parallelism splits.
_PARTS = {
    "tok_embeddings": ("embed", 0),
    "attention.wq": ("attn.q_proj", 0),
    "attention.wk": ("attn.k_proj", 0),
    "attention.wv": ("attn.v_proj", 0),
    "attention.wo": ("attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "output": ("head", 0),
}


@torch.no_grad()
def fill(model: nn.Module, config: TrainConfig) -> None:
    """Gives torchtitan's ``model`` the weights that ours starts from, each rank its own part; norms are one in both."""
    with torch.device("meta"):
        ours = Llama3(config.model)
    shapes = {name: param.shape for name, param in ours.named_parameters()}
    for full_name, param in model.named_parameters():
        name = re.sub(r"\._orig_mod|\._checkpoint_wrapped_module", "", full_name)  # torch.compile, recomputation
        layer, module = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name).groups(default="")
        if module not in _PARTS:
            continue
        our_name, split = f"{layer}{_PARTS[module][0]}.weight", _PARTS[module][1]
        local, shape = param.to_local() if isinstance(param, DTensor) else param, shapes[our_name]
        region = held(param, shape, split)
        head = config.model.head_dim if module in ("attention.wq", "attention.wk") else 1
        whole_heads = (region[0][0] // head * head, -(-region[0][1] // head) * head)
        drawn = torch.empty(whole_heads[1] - whole_heads[0], region[1][1] - region[1][0])
        ours.init_weights(config.seed, {our_name: Part(drawn, shape, (whole_heads, region[1]))})
        if head > 1:  # RoPE rotates neighbours there, halves of a head here
            drawn = drawn.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
        drawn = drawn[region[0][0] - whole_heads[0] :][: local.shape[0]]
        local.copy_(drawn.bfloat16() if config.precision == "bf16" else drawn)


def held(param: torch.Tensor, shape: torch.Size, split: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(start, stop) in each dimension of the part of a matrix that this rank holds: what tensor parallelism leaves of
    it, its rows chunked by FSDP."""
    region = [(0, size) for size in shape]
    places = {}
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        places = {
            name: (place, mesh.size(i))
            for i, (name, place) in enumerate(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
        }
    for axis, dim in (("tp", split), ("fsdp", 0)):
        if axis in places:
            (place, ranks), (start, stop) = places[axis], region[dim]
            chunk = -(-(stop - start) // ranks)
            region[dim] = (min(stop, start + place * chunk), min(stop, start + (place + 1) * chunk))
    return tuple(region)


class Titan:
    """A `Training` by torchtitan's ``Trainer``."""

    capture_s: float | None = None
    compile_s: float | None = None
    passes: list[str] | None = None

    def __init__(self, config: TrainConfig, batch: Batch, folder: str):
        from torchtitan.config import JobConfig
        from torchtitan.tools.logging import init_logger
        from torchtitan.train import Trainer

        start = time.perf_counter()
        init_logger()
        register(config, batch)
        job = JobConfig()
        for section, fields in job_sections(config, folder).items():
            for name, value in fields.items():
                setattr(getattr(job, section), name, value)
        self.trainer = Trainer(job)
        fill(self.trainer.model_parts[0], config)
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)
        self.build_s = time.perf_counter() - start

    def step(self, read: bool = False) -> float | None:
        """As one turn of the loop in ``Trainer.train``."""
        trainer, metrics = self.trainer, self.trainer.metrics_processor
        metrics.wanted = read
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(self.batches)
        return metrics.loss if read else None


@contextlib.contextmanager
def started(config: TrainConfig, batch: Batch) -> Iterator[Titan]:
    """torchtitan's trainer over the processes that were started; it opens and closes the process groups."""
    with tempfile.TemporaryDirectory(prefix="stepgraph-bench-", ignore_cleanup_errors=True) as folder:
        titan = Titan(config, batch, folder)
        try:
            yield titan
        finally:
            titan.trainer.close()
            torch.distributed.destroy_process_group()
