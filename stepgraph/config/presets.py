"""The presets: each a function that returns the whole configuration of a run, made to be read and copied.

The learning rates and batches of the Llama 3 sizes above 1B follow the report on Llama 3 (Table 3: peak learning rate
3e-4, 1.5e-4 and 8e-5; AdamW; a warm-up of 2,000 to 8,000 steps; cosine decay to 1% of the peak; sequences of 8,192
tokens). Source: Llama Team 2024, "The Llama 3 Herd of Models", arXiv 2407.21783. Those of the DeepSeek sizes follow
DeepSeek-AI 2024, "DeepSeek-V2", section 3.1 and appendix B, and "DeepSeek-V3 Technical Report", section 4.2. The batch
here is one GPU's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepgraph import models
from stepgraph.config.train import ModelConfig, TrainConfig

#: Parameters of a model whose steps are too few and too short to repay a compiler's time.
SMALL = 20_000_000


def llama3_debug() -> TrainConfig:
    """About 6M parameters, fp32: trains on two CPU cores in about three minutes, too few to repay a compiler's one."""
    return TrainConfig(
        preset="llama3-debug",
        model=models.llama3_debug(),
        inductor="off",
        seq_len=256,
        batch_size=8,
        steps=200,
        lr=2e-3,
        warmup_steps=10,
        val_every=50,
        checkpoint_every=50,
    )


def llama3_1b() -> TrainConfig:
    """Llama 3.2 1B, on one GPU."""
    return TrainConfig(
        preset="llama3-1b",
        model=models.llama3_1b(),
        precision="bf16",
        seq_len=4096,
        batch_size=4,
        steps=10_000,
        lr=3e-4,
        warmup_steps=500,
        val_every=500,
        checkpoint_every=500,
        log_every=10,
    )


def llama3_8b() -> TrainConfig:
    """Llama 3 8B, full recomputation."""
    return _llama3_large("llama3-8b", models.llama3_8b(), lr=3e-4, warmup_steps=2_000)


def llama3_70b() -> TrainConfig:
    """Llama 3 70B, full recomputation."""
    return _llama3_large("llama3-70b", models.llama3_70b(), lr=1.5e-4, warmup_steps=2_000)


def llama3_405b() -> TrainConfig:
    """Llama 3.1 405B, full recomputation."""
    return _llama3_large("llama3-405b", models.llama3_405b(), lr=8e-5, warmup_steps=8_000)


def deepseek_v3_debug() -> TrainConfig:
    """About 9M parameters, 3M of them active, fp32: trains on two CPU cores in a few minutes."""
    return TrainConfig(
        preset="deepseek-v3-debug",
        model=models.deepseek_v3_debug(),
        inductor="off",
        seq_len=256,
        batch_size=8,
        steps=200,
        lr=2e-3,
        warmup_steps=10,
        val_every=50,
        checkpoint_every=50,
    )


def deepseek_v3_16b() -> TrainConfig:
    """DeepSeek-V2-Lite's shape, with selection biases; its report's peak learning rate. Eight GPUs or more."""
    return _experts("deepseek-v3-16b", models.deepseek_v3_16b(), seq_len=4096, lr=4.2e-4)


def deepseek_v3_671b() -> TrainConfig:
    """DeepSeek-V3, full recomputation; its report's peak learning rate. For `stepgraph plan` and large clusters."""
    return _experts("deepseek-v3-671b", models.deepseek_v3_671b(), seq_len=4096, lr=2.2e-4, memory="full")


def qwen3_30b_a3b() -> TrainConfig:
    """Qwen3-30B-A3B, full recomputation."""
    return _experts("qwen3-30b-a3b", models.qwen3_30b_a3b(), seq_len=4096, lr=3e-4, memory="full")


def golf() -> TrainConfig:
    """The 11-layer, d=512 model of pytorch issue 179423, on one GPU."""
    return TrainConfig(
        preset="golf",
        model=models.golf(),
        precision="bf16",
        seq_len=2048,
        batch_size=32,
        steps=2_000,
        lr=1e-3,
        schedule="wsd",
        warmup_steps=100,
        val_every=200,
        checkpoint_every=500,
        log_every=10,
    )


def fine_tuning(folder: Path) -> TrainConfig:
    """The model in ``folder``, a Hugging Face checkpoint, trained on: a small learning rate, no weight decay.

    Raises ``ValueError``, in one line, for a folder with no model of the families here.
    """
    model = models.config_from_hf(folder)
    longest = models.family_of(model).longest(model)
    return TrainConfig(
        model=model,
        init_from_hf=folder,
        tokenizer=str(folder / "tokenizer.json"),
        inductor="full" if model.num_params() > SMALL else "off",
        seq_len=min(1024, longest or 1024),
        batch_size=4,
        steps=300,
        lr=2e-5,
        warmup_steps=10,
        weight_decay=0.0,
    )


def _experts(preset: str, model: ModelConfig, **options: Any) -> TrainConfig:
    plain = {"batch_size": 1, "steps": 500_000, "min_lr_ratio": 0.1, "warmup_steps": 2_000, "log_every": 10}
    every = {"val_every": 1_000, "checkpoint_every": 1_000}
    return TrainConfig(preset=preset, model=model, precision="bf16", **(plain | every | options))


def _llama3_large(preset: str, model: models.Llama3Config, *, lr: float, warmup_steps: int) -> TrainConfig:
    return TrainConfig(
        preset=preset,
        model=model,
        precision="bf16",
        memory="full",
        seq_len=8192,
        batch_size=1,
        steps=1_200_000,
        lr=lr,
        min_lr_ratio=0.01,
        warmup_steps=warmup_steps,
        val_every=1_000,
        checkpoint_every=1_000,
        log_every=10,
    )


#: Where none is named.
DEFAULT = "llama3-debug"

PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "llama3-debug": llama3_debug,
    "llama3-1b": llama3_1b,
    "llama3-8b": llama3_8b,
    "llama3-70b": llama3_70b,
    "llama3-405b": llama3_405b,
    "deepseek-v3-debug": deepseek_v3_debug,
    "deepseek-v3-16b": deepseek_v3_16b,
    "deepseek-v3-671b": deepseek_v3_671b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "golf": golf,
}
