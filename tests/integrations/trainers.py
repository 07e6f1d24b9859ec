"""Small runs of ``Trainer`` and `GraphTrainer`, and what they have to share."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments, set_seed  # noqa: E402

from stepgraph.integrations import GraphTrainer  # noqa: E402

VOCAB = 61
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)


def qwen(**options):
    set_seed(0)
    config = Qwen3Config(vocab_size=VOCAB, head_dim=8, attention_dropout=0.1, **SHAPE, **options)
    return AutoModelForCausalLM.from_config(config)


def sequences(count, length=12):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCAB, (count, length), generator=generator)
    labels = rows.clone()
    labels[::3, :5] = -100  # microbatches count different numbers of targets
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def trained(kind, folder, model=None, *, count=22, resume=None, trainer_options=None, **options):
    """(what was logged, the trainer) after an epoch over ``count`` sequences."""
    defaults = dict(per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1, save_strategy="no")
    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **(defaults | options))
    own = {"passes": "exact"} if kind is GraphTrainer else {}
    given = trainer_options or {}
    trainer = kind(model=model or qwen(), args=arguments, train_dataset=sequences(count), **(own | given))
    trainer.train(resume_from_checkpoint=resume)
    steps = [
        {k: log[k] for k in ("loss", "grad_norm", "learning_rate", "step")} for log in trainer.state.log_history[:-1]
    ]
    return steps, trainer


def both(folder, **options):
    return [trained(kind, folder / kind.__name__, **options) for kind in (Trainer, GraphTrainer)]


def check_same(first, second):
    assert first[0] == second[0]
    for (name, p), q in zip(first[1].model.named_parameters(), second[1].model.parameters(), strict=True):
        assert torch.equal(p, q), name


def encoded(rows):
    return transformers.BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
