"""The presets: what each sets of a run, made to be read and copied. Nothing here imports torch before one is made.

The learning rates and batches of the Llama 3 sizes above 1B follow the report on Llama 3 (Table 3: peak learning rate
3e-4, 1.5e-4 and 8e-5; AdamW; a warm-up of 2,000 to 8,000 steps; cosine decay to 1% of the peak; sequences of 8,192
tokens). Source: Llama Team 2024, "The Llama 3 Herd of Models", arXiv 2407.21783. Those of the DeepSeek sizes follow
DeepSeek-AI 2024, "DeepSeek-V2", section 3.1 and appendix B, and "DeepSeek-V3 Technical Report", section 4.2. The batch
here is one GPU's.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.config.train import TrainConfig

#: Parameters of a model whose steps are too few and too short to repay a compiler's time.
SMALL = 20_000_000

_DEBUG = {
    **{"inductor": "off", "seq_len": 256, "batch_size": 8, "steps": 200, "lr": 2e-3, "warmup_steps": 10},
    **{"val_every": 50, "checkpoint_every": 50},
}
_LARGE = {
    **{"precision": "bf16", "seq_len": 8192, "batch_size": 1, "steps": 1_200_000, "min_lr_ratio": 0.01},
    **{"warmup_steps": 2_000, "val_every": 1_000, "checkpoint_every": 1_000, "log_every": 10, "memory": "full"},
}
_EXPERTS = _LARGE | {"seq_len": 4096, "steps": 500_000, "min_lr_ratio": 0.1, "memory": "none"}

#: Name -> the function of `stepgraph.models` that gives the model's shape, and the options that are not the defaults.
_SETS: dict[str, tuple[str, dict[str, Any]]] = {
    # About 6M parameters, fp32: trains on two CPU cores in about three minutes, too few to repay a compiler's one.
    "llama3-debug": ("llama3_debug", _DEBUG),
    # Llama 3.2 1B, on one GPU.
    "llama3-1b": (
        "llama3_1b",
        {
            **{"precision": "bf16", "seq_len": 4096, "batch_size": 4, "steps": 10_000, "lr": 3e-4},
            **{"warmup_steps": 500, "val_every": 500, "checkpoint_every": 500, "log_every": 10},
        },
    ),
    # Llama 3 with full recomputation.
    "llama3-8b": ("llama3_8b", _LARGE | {"lr": 3e-4}),
    "llama3-70b": ("llama3_70b", _LARGE | {"lr": 1.5e-4}),
    "llama3-405b": ("llama3_405b", _LARGE | {"lr": 8e-5, "warmup_steps": 8_000}),
    # About 9M parameters, 3M of them active, fp32: trains on two CPU cores in a few minutes.
    "deepseek-v3-debug": ("deepseek_v3_debug", _DEBUG),
    # DeepSeek-V2-Lite's shape, with selection biases; its report's peak learning rate. Eight GPUs or more.
    "deepseek-v3-16b": ("deepseek_v3_16b", _EXPERTS | {"lr": 4.2e-4}),
    # DeepSeek-V3; its report's peak learning rate. For `stepgraph plan` and large clusters.
    "deepseek-v3-671b": ("deepseek_v3_671b", _EXPERTS | {"lr": 2.2e-4, "memory": "full"}),
    "qwen3-30b-a3b": ("qwen3_30b_a3b", _EXPERTS | {"lr": 3e-4, "memory": "full"}),
    # The 11-layer, d=512 model of pytorch issue 179423, on one GPU.
    "golf": (
        "golf",
        {
            **{"precision": "bf16", "seq_len": 2048, "batch_size": 32, "steps": 2_000, "lr": 1e-3, "schedule": "wsd"},
            **{"warmup_steps": 100, "val_every": 200, "checkpoint_every": 500, "log_every": 10},
        },
    ),
}


def settings(name: str) -> dict[str, Any]:
    """The options that the preset ``name`` sets."""
    return _SETS[name][1]


def _made(name: str) -> "TrainConfig":
    from stepgraph import models
    from stepgraph.config.train import TrainConfig

    shape, options = _SETS[name]
    return TrainConfig(preset=name, model=getattr(models, shape)(), **options)


def fine_tuning(folder: Path, lora: bool = False, dpo: bool = False) -> "TrainConfig":
    """The model in ``folder``, a Hugging Face checkpoint, trained on: a small learning rate, no weight decay. With
    ``lora`` it is always transformers', whose names adapters have. With ``dpo`` the learning rate is 20 times smaller.

    Raises ``ValueError``, in one line, for a folder with no model of the families here.
    """
    from stepgraph import models
    from stepgraph.config.train import TrainConfig

    model = models.config_from_hf(folder, own=not lora)
    longest = models.family_of(model).longest(model)
    return TrainConfig(
        model=model,
        init_from_hf=folder,
        tokenizer=str(folder / "tokenizer.json"),
        inductor="full" if model.num_params() > SMALL else "off",
        seq_len=min(1024, longest or 1024),
        batch_size=4,
        steps=300,
        lr=(1e-5 if lora else 1e-6) if dpo else 2e-4 if lora else 2e-5,
        warmup_steps=10,
        weight_decay=0.0,
    )


#: Where none is named.
DEFAULT = "llama3-debug"

#: Name -> what makes the configuration of a run.
PRESETS: dict[str, Callable[[], "TrainConfig"]] = {name: functools.partial(_made, name) for name in _SETS}
