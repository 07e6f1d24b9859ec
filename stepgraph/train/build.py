"""From a configuration to the parts of a run: device, model, optimizer, loss, and the captured step."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stepgraph
from stepgraph import passes
from stepgraph.models import Golf, Llama3, Llama3Config, next_token_loss
from stepgraph.train.config import TrainConfig
from stepgraph.train.hf_weights import load_hf


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU here: use --device cpu or --device auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build_model(config: TrainConfig, device: torch.device) -> nn.Module:
    """The model on ``device`` in its precision, with weights from the seed or from Hugging Face.

    Built on the meta device first, so that it never exists twice. The seed gives the same weights on every device.
    """
    with torch.device("meta"):
        model = Llama3(config.model) if isinstance(config.model, Llama3Config) else Golf(config.model)
    if config.precision == "bf16":
        for param in model.parameters():  # buffers (the RoPE tables) stay fp32
            param.data = param.data.to(torch.bfloat16)
    model.to_empty(device=device)
    model.init_weights(torch.Generator().manual_seed(config.seed))
    if config.init_from_hf is not None:
        load_hf(model, config.init_from_hf)
    return model


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with fp32 state: matrices decay, vectors (norm weights) do not. bf16 parameters get fp32 masters."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.precision == "bf16":
        return stepgraph.MasterAdamW(groups, **options)
    return torch.optim.AdamW(groups, **options, fused=True)


def build_loss(config: TrainConfig, device: torch.device) -> Callable[[nn.Module, Any], torch.Tensor]:
    """``loss_fn(model, batch)``: mean next-token cross-entropy in nats, under autocast if the precision says so."""

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        autocast = config.precision == "bf16-autocast"
        with torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
            return next_token_loss(model, batch)

    return loss_fn


def build_step(
    config: TrainConfig,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    batch: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    dump: Path | None,
) -> stepgraph.CapturedStep:
    """The training step as one graph, with the passes that the configuration asks for."""
    return stepgraph.capture(
        model,
        loss_fn,
        batch,
        optimizer,
        max_grad_norm=config.max_grad_norm,
        accumulate=config.accumulate,
        passes=passes.configured(
            config.passes, memory=config.memory, inductor=config.inductor, cuda_graph=config.cuda_graph
        ),
        disable=config.disable_pass,
        dump=dump,
    )
