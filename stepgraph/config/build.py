"""From a configuration to the parts of a run: device, model, optimizer, loss, and the captured step."""

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import stepgraph
from stepgraph import parallel
from stepgraph.capture.optimizer.update import Optimizers
from stepgraph.capture.state import repeated_blocks
from stepgraph.config.device import is_out_of_memory, memory_bytes, taken_by_others
from stepgraph.config.hf_weights import check_files, load_hf, load_parts
from stepgraph.config.train import TrainConfig
from stepgraph.costs.expert_chunks import Chosen, choose
from stepgraph.costs.expert_chunks import Layer as ExpertLayer
from stepgraph.kernels.quant import QuantizedWeight, quantize_experts, quantize_linear
from stepgraph.lower import StepSpec
from stepgraph.models import config_from_hf, family_of, next_token_loss
from stepgraph.models.loss import answer_log_probs, preference_loss
from stepgraph.models.transformers import CausalLM, CausalLMConfig, lora_options
from stepgraph.step import CapturedStep

_REDUCE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python, all of which a checkpoint keeps."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def build_model(config: TrainConfig, device: torch.device, mesh: parallel.Mesh | None = None) -> nn.Module:
    """The model on ``device`` in its precision, or this rank's shards of it, with weights from the seed or from
    Hugging Face. The seed gives the same weights on every device and mesh."""
    if isinstance(config.model, CausalLMConfig):
        inner = _of_transformers(config, device, mesh, weights=config.init_from_hf is not None)
        if config.document_mask == "on":
            with _autocast(config, device):
                inner.check_documents()
        return inner
    model = empty_model(config, device, mesh)
    if config.init_from_hf is not None:
        load_hf(model, config.init_from_hf)
    else:
        model.init_weights(config.seed, None if mesh is None else parallel.local_parts(model))
    if config.precision == "bf16" and mesh is not None:
        parallel.round_to(model, torch.bfloat16)
    return model


def empty_model(config: TrainConfig, device: torch.device, mesh: parallel.Mesh | None = None) -> nn.Module:
    """The model that `build_model` fills, its tensors allocated only.

    Built on the meta device first, so that it never exists twice, and under a mesh never whole.
    """
    if isinstance(config.model, CausalLMConfig):
        return _of_transformers(config, device, mesh, weights=False)
    with torch.device("meta"):
        model = family_of(config.model).model(config.model)
    bf16 = config.precision == "bf16"
    if bf16 and mesh is None:
        for param in model.parameters():  # buffers (the RoPE tables) stay fp32
            param.data = param.data.to(torch.bfloat16)
    try:
        if mesh is None:
            model.to_empty(device=device)
        else:  # fp32 shards, which bf16 training gathers in bf16
            plan = family_of(config.model).tp_plan(config.model)
            dtypes = {"param_dtype": torch.bfloat16 if bf16 else None, "reduce_dtype": _REDUCE[config.reduce_dtype]}
            names = ("expert_capacity", "expert_chunks", "expert_exchange", "context")
            ways = {name: getattr(config, name) for name in names}
            if (chosen := chosen_chunks(config)) is not None:
                ways["expert_chunks"] = chosen.chunks
            pipeline = _pipeline(config, model, mesh) if mesh.axis("pp") is not None else None
            parallel.parallelize(model, mesh, plan, device=device, pipeline=pipeline, **ways, **dtypes)
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        needs = sum(p.nbytes for p in model.parameters()) / 2**30
        has = memory_bytes(device) / 2**30
        raise ValueError(
            f"the model does not fit: its parameters alone take {needs:.1f} GiB, the {device.type} device has "
            f"{has:.1f} GiB{taken_by_others(device) or '; choose a smaller one'}"
        ) from failure
    return model


def chosen_chunks(config: TrainConfig) -> Chosen | None:
    """What ``expert_chunks=auto`` chooses; None where a number is given, or the model has no experts."""
    spec, moe = config.mesh_spec, getattr(config.model, "moe", None)
    if config.expert_chunks != "auto" or spec is None or moe is None:
        return None
    layer = ExpertLayer(
        tokens=config.batch_size * config.seq_len // (spec.tp * spec.cp),
        slots=moe.top_k,
        dim=config.model.dim,
        width=moe.ffn_dim,
        here=moe.n_experts // spec.ep,
        ranks=spec.ep,
        shared=moe.n_shared * moe.ffn_dim,
        room=config.expert_capacity if config.expert_exchange == "collectives" else 1.0,
        itemsize=4 if config.precision == "fp32" else 2,
        fp8=config.fp8_experts,
        recomputed=config.memory == "full",
    )
    return choose(layer)


def _of_transformers(config: TrainConfig, device: torch.device, mesh: parallel.Mesh | None, weights: bool) -> CausalLM:
    """A model of transformers, with ``weights`` of its folder or drawn ones. Under a mesh each rank reads its part of
    them; or the whole model, only on the host, if it is quantized or an adapter starts from the weights (DoRA).

    bf16 shards of weights that are all trained are fp32, gathered in bf16. With LoRA they are bf16, and the adapter
    has fp32 copies in the optimizer, as without a mesh.
    """
    bf16, whole = config.precision == "bf16", device if mesh is None else torch.device("cpu")
    lora = None if config.lora is None else lora_options(config.lora)
    rounds = bf16 and mesh is not None and lora is None
    dtype = torch.bfloat16 if bf16 and not rounds else torch.float32
    quantize = None if config.quantize is None else partial(_quantize, config.quantize, device, mesh is not None)
    reads = weights or lora is not None
    shapes = check_files(config.model.folder) if reads else None
    if mesh is None or quantize is not None or (lora is not None and "use_dora" in lora):
        shapes = None
    with torch.device(whole):
        model = CausalLM(config.model, dtype, weights, lora, quantize, shapes).to(whole)
    if model.whole_because and mesh is not None and mesh.dp_place == 0:
        warnings.warn(f"every rank reads {config.model.folder} whole: {model.whole_because}", stacklevel=2)
    if lora is not None and config.precision == "bf16-autocast":
        model.round_frozen(torch.bfloat16)
    if mesh is not None:
        dtypes = {"param_dtype": torch.bfloat16 if rounds else None, "reduce_dtype": _REDUCE[config.reduce_dtype]}
        parallel.parallelize(model, mesh, device=device, **dtypes)
        if model.pieces:
            load_parts(model)
        if rounds:
            parallel.round_to(model, torch.bfloat16)
        seed_all(config.seed + mesh.dp_place)  # dropout of its own on each rank
    return model


def _quantize(
    kind: str, device: torch.device, back: bool, model: Any, experts: bool
) -> tuple[dict[str, QuantizedWeight], str]:
    """Quantize the linear layers of a model of transformers but its head, or its ``experts``, on ``device``: the
    quantized weights by parameter name, and one line about weights left unquantized, empty if there are none."""
    if experts:
        return quantize_experts(model, kind, device=device, back=back)
    skip = [path for path, module in model.named_modules() if module is model.get_output_embeddings()]
    paths = quantize_linear(model, kind, skip=skip, device=device, back=back)
    return {f"{path}.weight": model.get_submodule(path) for path in paths}, ""


def _pipeline(config: TrainConfig, model: nn.Module, mesh: parallel.Mesh) -> parallel.Pipeline:
    """The stages of the model, cut by the cost of a microbatch."""
    shape = (config.batch_size, config.seq_len)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in _batch_names(config)}
    cut = (config.pipeline_schedule, config.stage_starts, config.stage_sends)
    return parallel.plan_pipeline(model, next_token_loss, batch, mesh, *cut)


def build_optimizer(config: TrainConfig, model: nn.Module) -> Optimizers:
    """AdamW with fp32 state: matrices decay, vectors (norm weights) do not. bf16 parameters get fp32 masters; shards
    are fp32 themselves. With ``optimizer="muon"`` a list of two: Muon for the matrices of the model's blocks, its steps
    scaled to the size of AdamW's, so that one learning rate serves both; and AdamW for the rest."""
    if config.optimizer == "muon":
        blocks = [model.get_submodule(path) for path in repeated_blocks(model)]
        matrices = dict.fromkeys(p for block in blocks for p in block.parameters() if p.ndim == 2 and not p.is_meta)
        scaled = {"lr": config.lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        rest = [p for p in parallel.held_parameters(model).values() if p not in matrices]
        return [torch.optim.Muon(list(matrices), **scaled), _adamw(config, rest)]
    return _adamw(config, [p for p in parallel.held_parameters(model).values() if p.requires_grad])


def param_groups(optimizer: Optimizers) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer, or of all in a list."""
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    return [group for one in several for group in one.param_groups]


def _adamw(config: TrainConfig, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    if (spec := config.mesh_spec) is None or spec.pp == 1:  # every rank of a pipeline has the same groups
        groups = [group for group in groups if group["params"]]
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if params[0].dtype == torch.bfloat16:
        return stepgraph.MasterAdamW(groups, **options)
    return torch.optim.AdamW(groups, **options, fused=True)


def build_loss(
    config: TrainConfig, device: torch.device, mesh: parallel.Mesh | None = None
) -> Callable[[nn.Module, Any], torch.Tensor]:
    """``loss_fn(model, batch)``: mean next-token cross-entropy in nats, over the mesh if there is one, or DPO's loss,
    with its metrics; under autocast if the precision says so."""
    plain = next_token_loss if mesh is None else parallel.next_token_loss(mesh)
    if config.loss == "dpo":
        plain = _preferences(config, build_reference(config, device, mesh), mesh)

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with _autocast(config, device):
            return plain(model, batch)

    return loss_fn


def _autocast(config: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager:
    autocast = config.precision == "bf16-autocast"
    return torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext()


def build_reference(config: TrainConfig, device: torch.device, mesh: parallel.Mesh | None = None) -> nn.Module | None:
    """The frozen model of DPO, over the mesh if given, or None where it is the trained one without its adapter."""
    if config.lora is not None and config.reference is None:
        return None
    folder = config.reference or config.init_from_hf
    own = not isinstance(config.model, CausalLMConfig)
    plain = {"model": config_from_hf(folder, own=own), "init_from_hf": folder, "lora": None, "quantize": None}
    model = build_model(dataclasses.replace(config, **plain), device, mesh).requires_grad_(False).eval()
    if isinstance(model, CausalLM) and config.precision == "bf16-autocast":
        model.round_frozen(torch.bfloat16)
    return model


def _preferences(
    config: TrainConfig, reference: nn.Module | None, mesh: parallel.Mesh | None
) -> Callable[[nn.Module, Any], torch.Tensor]:
    """DPO's loss; without a ``reference``, the model is one while its adapter is off."""
    over_ranks = {} if mesh is None else {"over_ranks": partial(parallel.mean_over_mesh, mesh=mesh)}

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), contextlib.nullcontext() if reference is not None else model.without_adapter():
            base = answer_log_probs(model if reference is None else reference, batch)
        answers = answer_log_probs(model, batch)
        loss, metrics = preference_loss(answers, base, batch, config.beta, config.label_smoothing, **over_ranks)
        for name, value in metrics.items():
            stepgraph.metric(name, value)
        return loss

    return loss_fn


def example_batch(config: TrainConfig, device: torch.device, chat: bool = False) -> dict[str, torch.Tensor]:
    """A batch of the form that training reads, int64 (accumulate * B, T); capture looks at the form only. ``chat``: of
    conversations, with the number of targets in a row."""
    shape = (config.accumulate * config.batch_size, config.seq_len)
    batch = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in _batch_names(config)}
    count = "pairs_per_row" if config.loss == "dpo" else "targets_per_row"
    return batch | ({count: torch.ones((), device=device)} if chat else {})


def _batch_names(config: TrainConfig) -> tuple[str, ...]:
    return ("tokens", "targets", "positions") if config.document_mask == "on" else ("tokens", "targets")


def step_spec(
    config: TrainConfig,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    batch: dict[str, torch.Tensor],
    optimizer: Optimizers,
) -> StepSpec:
    """What the training step of ``config`` is."""
    return StepSpec(
        model,
        loss_fn,
        batch,
        optimizer,
        # Without clipping, an infinite limit: gradients keep their bits and the step still reports their norm.
        max_grad_norm=float("inf") if config.max_grad_norm is None else config.max_grad_norm,
        accumulate=config.accumulate,
        skip_nonfinite=config.on_nonfinite == "skip",
        placement=parallel.placement_of(model),
        passes=config,
    )


def build_step(config: TrainConfig, spec: StepSpec, dump: Path | None = None) -> CapturedStep:
    """The training step as one graph, with the passes that the configuration asks for."""
    return CapturedStep(spec, dump, None if config.saved_steps == "off" else config.saved_steps)
