"""What tests of Hugging Face models over ranks share, on CPUs and on GPUs: models, data, and one run after another."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from stepgraph.integrations import GraphTrainer
from stepgraph.integrations.trainer import _TARGETS

VOCAB, LENGTH, ROWS = 67, 12, 24  # of a vocabulary that two ranks do not divide
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
#: Models as Hugging Face has them: name -> (configuration, options next to the shape).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "llama3.2": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}


def build(name: str, scale: int = 1, **options: Any) -> torch.nn.Module:
    """The model ``name``, ``scale`` times as wide; the same weights on every rank."""
    import transformers

    config, own = MODELS[name]
    widths = {key: size * scale if key.endswith("_size") else size for key, size in (SHAPE | own).items()}
    shape = {"num_key_value_heads": 2, "head_dim": 8 * scale, "vocab_size": VOCAB, "pad_token_id": 0}
    set_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**shape | widths | options))


def rows(count: int = ROWS, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Sequences that count different numbers of targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (count, length), generator=generator)
    labels = tokens.clone()
    labels[::3, : length // 2] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


class Seen(TrainerCallback):
    """The steps that ended on this rank."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.steps.append(state.global_step)


def train(
    kind: type[Trainer], folder: Path | str, model: torch.nn.Module, resume: Path | str | None = None,
    own: dict[str, Any] | None = None, data: list | None = None, **options: Any,
) -> Trainer:  # fmt: skip
    """The trainer after an epoch of six steps of four sequences: on each rank of two, two of them."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    cpu = {"use_cpu": True} if options.pop("use_cpu", True) else {}
    arguments = TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4 // world, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no",
            "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "report_to": [], "disable_tqdm": True,
            "per_device_eval_batch_size": 4 // world, **cpu, **options,
        },
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=data or rows(), eval_dataset=rows(8), **(own or {}))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def close(found: list[float], expected: list[float], tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)


def as_launched(function: Any, *args: Any) -> None:
    """``function(*args)`` in a process group that is open, with the environment of torchrun."""
    launched_as(dist.get_rank(), dist.get_world_size(), 0)
    function(*args)


def launched_as(rank: int, world: int, port: int) -> None:
    """What torchrun tells a rank of one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "localhost", **{name: str(number) for name, number in numbers.items()}}


SAVES = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}


def one_process(folder: Path, name: str, shape: dict[str, Any] | None = None, **options: Any) -> None:
    """What plain ``Trainer`` does alone: its checkpoint, and what it logs as ``one.pt``."""
    trainer = train(Trainer, folder / "one", build(name, **(shape or {})), **SAVES, **options)
    found = {key: logged(trainer, key) for key in ("loss", "eval_loss", "grad_norm", "learning_rate")}
    torch.save(found, folder / "one.pt")


def logged(trainer: Trainer, key: str) -> list[float]:
    return [log[key] for log in trainer.state.log_history if key in log]


def check_ranks(
    folder: Path, name: str, own: dict[str, Any], shape: dict[str, Any] | None = None, tolerance: float = 2e-6,
    **options: Any,
) -> None:  # fmt: skip
    """`GraphTrainer` with ``options`` of ``TrainingArguments`` and ``own`` ones, compared with what `one_process` has
    left in ``folder``: the same losses within ``tolerance``, and with exact passes bitwise the program run eagerly.
    ``shape``: options of `build`."""
    expected, seen, shape = torch.load(folder / "one.pt", weights_only=True), Seen(), shape or {}
    own = {"passes": "exact", **own}
    given = {**own, "callbacks": [seen]}
    trainer = train(GraphTrainer, folder / "ranks", build(name, **shape), own=given, **SAVES, **options)
    assert seen.steps == [1, 2, 3, 4, 5, 6]
    for key, values in expected.items():
        close(logged(trainer, key), values, tolerance * (100 if key == "grad_norm" else 1))
    exact = own["passes"] == "exact"
    if exact:
        report = trainer.captured.verify(_batch_of(trainer))
        assert report.bitwise, report
    dist.barrier()
    for source in ("one", "ranks"):
        start, checkpoint = build(name, **shape), folder / source / "checkpoint-3"
        again = train(GraphTrainer, folder / "again", start, checkpoint, own=own, **options)
        close(logged(again, "loss"), logged(trainer, "loss"), 0 if exact and source == "ranks" else tolerance)


def _batch_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return {**batch, _TARGETS: torch.tensor(40, device=trainer.args.device)}


def check_what_ranks_saved(
    folder: Path, name: str, shape: dict[str, Any] | None = None, tolerance: float = 2e-6, **options: Any
) -> None:
    """Plain ``Trainer`` and `GraphTrainer`, each alone, resume from the checkpoint of two ranks; and it holds the
    weights under the names that transformers gives them."""
    expected = torch.load(folder / "one.pt", weights_only=True)["loss"]
    checkpoint = folder / "ranks/checkpoint-3"
    found, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info.values()), info
    for kind in (Trainer, GraphTrainer):
        own = {"passes": "exact"} if kind is GraphTrainer else {}
        # Trainer leaves experts as the model has them when it resumes.
        model = found if kind is Trainer and name == "qwen3-moe" else build(name, **(shape or {}))
        trainer = train(kind, folder / "last", model, checkpoint, own=own, **options)
        close(logged(trainer, "loss"), expected, tolerance)
