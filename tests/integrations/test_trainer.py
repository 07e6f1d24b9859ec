"""`GraphTrainer` next to ``transformers.Trainer``: the same logs, the same weights, the same checkpoints."""

import os

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments  # noqa: E402

from stepgraph.integrations import GraphTrainer  # noqa: E402
from stepgraph.integrations import trainer as trainer_module  # noqa: E402
from stepgraph.passes import StepOptions, Target  # noqa: E402
from tests.integrations.trainers import both, check_same, qwen, sequences, trained  # noqa: E402


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),  # the rest hold it too
        pytest.param({"gradient_accumulation_steps": 4}, marks=pytest.mark.long),  # the epoch ends with 3 microbatches
        {"gradient_accumulation_steps": 2, "count": 7},  # and with microbatches of two sequences and of one
        {"bf16": True, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": -1.0, "count": 6},  # off, as 0 is
        {"max_grad_norm": 0.3},
        {"optim": "adamw_torch", "num_train_epochs": 2},
    ],
    ids=str,
)
def test_same_as_the_plain_trainer(tmp_path, options):
    first, second = both(tmp_path, **options)
    check_same(first, second)
    assert len(first[0]) >= 2
    assert second[1].captured is not None and {r.name for r in second[1].captured.report} >= {"inplace_update"}
    assert all(p.grad is None for p in second[1].model.parameters())


def test_what_compiles_is_started_before_the_data_is_set_up(tmp_path, monkeypatch):
    order = []

    class Early(GraphTrainer):
        def get_train_dataloader(self):
            raise RuntimeError("no data")

    monkeypatch.setattr(trainer_module, "prepare", lambda *given: order.append(given))
    with pytest.raises(RuntimeError, match="no data"):
        trained(Early, tmp_path, trainer_options={"passes": iter(["dead_code"])})
    assert order == [(("dead_code",), (), Target("cpu"))]


def test_a_batch_is_verified_as_the_loader_gives_it(tmp_path):
    """Without the number of targets that ``Trainer`` passes."""
    (trainer,) = [trainer for _, trainer in both(tmp_path) if isinstance(trainer, GraphTrainer)]
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert trainer.captured.verify(batch).bitwise


@pytest.mark.parametrize("exact", [2, 4])
def test_accumulation_that_is_a_power_of_two_is_exact(tmp_path, exact):
    check_same(*both(tmp_path, gradient_accumulation_steps=exact, count=16))


def test_three_microbatches_round_once_more(tmp_path):
    first, second = both(tmp_path, gradient_accumulation_steps=3, count=18)
    for a, b in zip(first[0], second[0], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("loss", ["smoothed", "function", "method"])
def test_other_losses(tmp_path, loss):
    """Label smoothing, ``compute_loss_func``, and a subclass whose ``compute_loss`` is a mean of its microbatch."""
    options = {"gradient_accumulation_steps": 2, "count": 8}
    if loss == "smoothed":
        check_same(*both(tmp_path, label_smoothing_factor=0.1, **options))
    elif loss == "function":

        def of_logits(outputs, labels, num_items_in_batch=None):
            return torch.nn.functional.cross_entropy(
                outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum"
            ) / (num_items_in_batch)

        check_same(*both(tmp_path, trainer_options={"compute_loss_func": of_logits}, **options))
    else:

        class Own:
            loss_is_scaled_for_ga = False

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return model(**inputs).logits.float().square().mean()

        kinds = [type(kind.__name__, (Own, kind), {}) for kind in (Trainer, GraphTrainer)]
        steps = []
        for i, kind in enumerate(kinds):
            arguments = TrainingArguments(
                str(tmp_path / str(i)), per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1,
                gradient_accumulation_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
            )  # fmt: skip
            own = {"passes": "exact"} if i else {}
            trainer = kind(model=qwen(), args=arguments, train_dataset=sequences(8), **own)
            trainer.train()
            steps.append([log["loss"] for log in trainer.state.log_history[:-1]])
        assert steps[0] == steps[1] and len(steps[0]) == 2


def test_saving_and_resuming(tmp_path):
    """Resumed at step 4 of 11, from its own checkpoint and from the plain Trainer's, it ends as if never stopped."""
    whole, saved = both(tmp_path, save_strategy="steps", save_steps=4)
    check_same(whole, saved)
    for kind in (Trainer, GraphTrainer):
        source = tmp_path / kind.__name__ / "checkpoint-4"
        assert {"optimizer.pt", "scheduler.pt", "trainer_state.json"} <= set(os.listdir(source))
        again = trained(GraphTrainer, tmp_path / "again", resume=str(source))
        assert again[0] == whole[0]
        check_same(whole, again)


def test_optimizer_state_on_the_host_is_saved_and_resumed(tmp_path):
    """By the plain Trainer too; clipped, and in microbatches."""
    given = {"trainer_options": {"passes": StepOptions("exact", offload_optimizer=True)}}
    options = {"count": 16, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = trained(Trainer, tmp_path / "plain", **options)
    check_same(whole, trained(GraphTrainer, tmp_path / "host", **options, **given))
    for kind, source, own in ((GraphTrainer, "plain", given), (GraphTrainer, "host", given), (Trainer, "host", {})):
        again = trained(kind, tmp_path / "again", resume=str(tmp_path / source / "checkpoint-2"), **options, **own)
        check_same(whole, again)
        if kind is GraphTrainer:
            (step,) = again[1]._steps.values()
            assert any(report.name == "offload_optimizer" and report.changed for report in step.report)


def test_saving_captures_nothing_again(tmp_path, recwarn):
    """``save_pretrained`` writes the model's class and dtype into its configuration."""
    _, trainer = trained(GraphTrainer, tmp_path, count=8, save_strategy="steps", save_steps=2)
    assert trainer.model.config.architectures == ["Qwen3ForCausalLM"]
    assert not [w for w in recwarn if "captured again" in str(w.message)]


def test_evaluation_between_steps(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 3, "trainer_options": {"eval_dataset": sequences(4)}}
    logs = []
    for kind in (Trainer, GraphTrainer):
        given = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no"}
        arguments = TrainingArguments(
            str(tmp_path / kind.__name__), report_to=[], use_cpu=True, disable_tqdm=True, eval_strategy="steps",
            eval_steps=3, **given,
        )  # fmt: skip
        own = {"passes": "exact"} if kind is GraphTrainer else {}
        trainer = kind(model=qwen(), args=arguments, train_dataset=sequences(12), **options["trainer_options"], **own)
        trainer.train()
        logs.append(
            [{k: v for k, v in log.items() if k in ("loss", "eval_loss")} for log in trainer.state.log_history[:-1]]
        )
    assert logs[0] == logs[1] and sum("eval_loss" in log for log in logs[0]) == 2


def test_default_passes_train_as_well(tmp_path):
    first = trained(Trainer, tmp_path / "plain")
    arguments = TrainingArguments(
        str(tmp_path / "graph"), per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    passes = StepOptions(inductor="off", norm="kernel")
    trainer = GraphTrainer(model=qwen(), args=arguments, train_dataset=sequences(22), passes=passes)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history[:-1]]
    assert losses == pytest.approx([log["loss"] for log in first[0]], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fp16": True}, "use bf16=True"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "drop torch_compile"),
        ({"use_adaptive_entropy": True}, "drop it and set entropy_coef"),
        ({"debug": ["underflow_overflow"]}, "debug='underflow_overflow'.*drop it"),
    ],
)
def test_what_is_refused(tmp_path, options, match):
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for name, value in options.items():  # as they are where a GPU takes them
        setattr(arguments, name, value)
    with pytest.raises(ValueError, match=match):
        GraphTrainer(model=qwen(), args=arguments, train_dataset=sequences(4))


PLAIN_STEP = Trainer.training_step


class Reverses(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        assert Trainer.training_step is PLAIN_STEP  # other threads may train by it
        return super().training_step(model, inputs | {"input_ids": inputs["input_ids"].flip(1)}, num_items_in_batch)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_training_step_of_another_trainer_runs_around_the_captured_one(tmp_path, accumulation):
    class Mixed(GraphTrainer, Reverses):
        pass

    ends = []
    for kind, own in ((Reverses, {}), (Mixed, {"passes": "exact"})):
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        trainer = kind(model=qwen(), args=arguments, train_dataset=sequences(8), **own)
        trainer.train()
        ends.append(([log["loss"] for log in trainer.state.log_history[:-1]], trainer))
    check_same(*ends)


def test_several_gpus_are_refused(tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=0"):
        GraphTrainer(model=qwen(), args=arguments, train_dataset=sequences(4))


def test_microbatches_of_different_lengths(tmp_path, caplog):
    """The first step's microbatches differ, the second's do not."""
    data = sequences(2) + sequences(2, length=10) + sequences(4)
    ends = []
    for kind in (Trainer, GraphTrainer):
        arguments = TrainingArguments(
            str(tmp_path / kind.__name__), per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1,
        )  # fmt: skip
        own = {"passes": "exact"} if kind is GraphTrainer else {}
        trainer = kind(model=qwen(), args=arguments, train_dataset=data, **own)
        trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(data)
        trainer.train()
        ends.append(([log["loss"] for log in trainer.state.log_history[:-1]], trainer))
    assert ends[0][0] == ends[1][0] and len(ends[0][0]) == 6
    check_same(*ends)
    assert "differ in shape" in caplog.text


def test_masks_that_eager_drops_of_some_microbatches(tmp_path, recwarn):
    def masked(rows):
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -3:] = batch["labels"][0, 0] != -100
        return batch | {"attention_mask": mask}

    ends = both(tmp_path, gradient_accumulation_steps=2, trainer_options={"data_collator": masked})
    check_same(*ends)
    assert ends[1][1]._apart and not any("hides nothing" in str(w.message) for w in recwarn)


class Computed:
    """As TRL's: the mask is made of parts of the batch, which no name says is one."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        mask = torch.cat([inputs.pop("first_mask"), inputs.pop("other_mask")], dim=1)
        return super().compute_loss(model, {**inputs, "attention_mask": mask}, *args, **kwargs)


def test_computed_masks_that_eager_drops_of_some_microbatches(tmp_path, recwarn):
    def masked(rows):
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -3:] = batch["labels"][0, 0] != -100
        return batch | {"first_mask": mask[:, :4], "other_mask": mask[:, 4:]}

    ends = []
    for base in (Trainer, GraphTrainer):
        kind = type(base.__name__, (Computed, base), {})
        own = {"passes": "exact"} if base is GraphTrainer else {}
        options = {"data_collator": masked, **own}
        ends.append(
            trained(
                kind, tmp_path / base.__name__, gradient_accumulation_steps=2, trainer_options=options,
                remove_unused_columns=False,
            )
        )  # fmt: skip
    check_same(*ends)
    assert ends[1][1]._apart and not any("hides nothing" in str(w.message) for w in recwarn)
