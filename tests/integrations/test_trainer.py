"""`GraphTrainer` beside ``transformers.Trainer``: the same logs, the same weights, the same checkpoints."""

import os

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments, set_seed  # noqa: E402

import stepgraph  # noqa: E402
from stepgraph import CaptureError  # noqa: E402
from stepgraph.integrations import GraphTrainer  # noqa: E402
from stepgraph.passes import StepOptions  # noqa: E402

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


class Scaled:
    """A loss times what its batch, nested, has as a scalar."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs["of"]).loss * inputs["scale"]


def nested(scale):
    def collate(rows):
        of = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {"of": of, "scale": scale(of["input_ids"])}

    return collate


def of_kind(mixin, collate=None, **options):
    """What `both` gives, for subclasses with ``mixin``."""
    ends = []
    for kind in (Trainer, GraphTrainer):
        arguments = TrainingArguments(
            per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", **options,
        )  # fmt: skip
        own = {"passes": "exact"} if kind is GraphTrainer else {}
        trainer = type(kind.__name__, (mixin, kind), {})(
            model=qwen(), args=arguments, train_dataset=sequences(8), data_collator=collate, **own
        )
        trainer.train()
        ends.append(([log["loss"] for log in trainer.state.log_history[:-1]], trainer))
    return ends


def test_nested_batches_are_one_graph(tmp_path):
    options = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2}
    ends = of_kind(Scaled, nested(lambda rows: 2.0), **options)
    check_same(*ends)
    assert ends[1][1].captured is not None


def test_microbatches_that_differ_in_a_scalar(tmp_path):
    """Each has its own, where all once had the first one's."""
    options = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2}
    check_same(*of_kind(Scaled, nested(lambda rows: rows.float().mean() / 10), **options))


class Annealed:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * (1 + self.state.global_step)


def test_a_loss_that_reads_the_trainers_state(tmp_path, recwarn):
    check_same(*of_kind(Annealed, output_dir=str(tmp_path)))
    told = [str(w.message) for w in recwarn if "global_step changed" in str(w.message)]
    assert told[0] == "loss_fn.self.state.global_step changed from 0 to 1: the step is captured again"
    assert "has changed 3 times" in told[2] and "pass it in the batch" in told[2] and len(told) <= 4


class Keeps:
    kept = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.kept = self.keep(loss)
        return loss

    def keep(self, loss):
        return self.kept + 1


class KeepsTensor(Keeps):
    def keep(self, loss):
        return loss.detach()


def test_a_loss_that_counts(tmp_path):
    first, second = of_kind(Keeps, output_dir=str(tmp_path))
    check_same(first, second)
    assert first[1].kept == second[1].kept > 0


def test_a_loss_that_keeps_a_tensor_is_refused(tmp_path):
    with pytest.raises(CaptureError, match=r"the loss keeps a tensor of the step in loss_fn\.self\.kept"):
        of_kind(KeepsTensor, output_dir=str(tmp_path))


class Clamps(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            p.grad.clamp_(-1e-4, 1e-4)


def test_a_callback_that_changes_gradients(tmp_path):
    check_same(*both(tmp_path, trainer_options={"callbacks": [Clamps()]}, optim="sgd", count=6))


class HalvesBetween(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            p.grad.mul_(0.5)


def test_a_callback_that_changes_gradients_between_microbatches(tmp_path):
    options = {"trainer_options": {"callbacks": [HalvesBetween()]}, "optim": "sgd", "gradient_accumulation_steps": 2}
    check_same(*both(tmp_path, count=7, **options))


class Halves:
    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        model.lm_head.weight.grad.mul_(0.5)
        return loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_subclass_that_changes_gradients(tmp_path, accumulation):
    options = {"gradient_accumulation_steps": accumulation, "optim": "sgd"}
    check_same(*of_kind(Halves, output_dir=str(tmp_path), **options))


class HasANumberOfItsOwn:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        return model(**inputs).loss * inputs.pop("num_items_in_batch") / num_items_in_batch


def numbered(rows):
    return dict(encoded(rows)) | {"num_items_in_batch": torch.tensor(3.0)}


def test_a_batch_with_a_number_of_items_of_its_own(tmp_path):
    check_same(*of_kind(HasANumberOfItsOwn, numbered, output_dir=str(tmp_path), remove_unused_columns=False))


class Wavers(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.norm().item() > 1e-3:
                    p.data.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_optimizer_that_no_graph_can_have_updates_in_eager_mode(tmp_path, caplog, accumulation):
    ends = []
    for kind in (Trainer, GraphTrainer):
        model = qwen()
        options = {"optimizers": (Wavers(model.parameters(), lr=0.1), None)}
        given = {"count": 8, "gradient_accumulation_steps": accumulation, "trainer_options": options}
        ends.append(trained(kind, tmp_path / kind.__name__, model, **given))
    check_same(*ends)
    (said,) = [one.getMessage() for one in caplog.records if "in eager mode" in one.getMessage()]
    assert "Wavers.step" in said and "\n" not in said
    assert ends[1][1].captured is None


def test_an_error_of_the_loss_is_not_taken_for_the_optimizers(tmp_path):
    class Reads:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs).loss
            return loss if loss > 1e9 else loss * 2

    with pytest.raises(CaptureError, match="reads a value of the step in Python, and the loss depends on it"):
        of_kind(Reads, output_dir=str(tmp_path))


class Preferred:
    """Reads a reference model and an option of its own, which a callback changes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reference, self.beta = qwen().eval().requires_grad_(False), 0.1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with torch.no_grad():
            other = self.reference(**inputs).loss
        return (loss - self.beta * other) ** 2


class Changes(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        trainer = self.trainer
        if state.global_step == 2:
            set_seed(5)
            trainer.reference = qwen(rms_norm_eps=0.1).eval().requires_grad_(False)
        if state.global_step == 3:
            trainer.reference.load_state_dict({k: v * 2 for k, v in trainer.model.state_dict().items()}, assign=True)
        if state.global_step == 4:
            trainer.beta = torch.tensor(0.5).numpy()[()]
        if state.global_step == 5:
            trainer.reference.to(torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*captured again")
def test_a_reference_model_that_is_replaced_loaded_or_cast(tmp_path):
    runs = []
    for kind in (Trainer, GraphTrainer):
        own = type(kind.__name__, (Preferred, kind), {})
        arguments = TrainingArguments(
            str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2, max_steps=8,
            logging_steps=1, save_strategy="no",
        )  # fmt: skip
        given = {"passes": "exact"} if kind is GraphTrainer else {}
        callback = Changes()
        trainer = own(model=qwen(), args=arguments, train_dataset=sequences(16), callbacks=[callback], **given)
        callback.trainer = trainer
        trainer.train()
        runs.append(([log.get("loss") for log in trainer.state.log_history], trainer))
    check_same(*runs)


class Measuring(GraphTrainer):
    seen = 0

    def compute_loss(self, model, inputs, **options):
        targets = (inputs["labels"] != -100).sum()
        stepgraph.metric("targets", targets)
        self.seen += targets.item()
        self.log({"seen": self.seen})
        return super().compute_loss(model, inputs, **options)


def test_logs_have_what_the_loss_reported_and_read(tmp_path):
    arguments = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2, logging_steps=2,
        save_strategy="no", num_train_epochs=1, gradient_accumulation_steps=2, max_steps=4,
    )  # fmt: skip
    trainer = Measuring(model=qwen(), args=arguments, train_dataset=sequences(16), passes="exact")
    trainer.train()
    targets = sum(int((example["labels"] != -100).sum()) for example in trainer.train_dataset)
    logged = [log["targets"] for log in trainer.state.log_history if "loss" in log]
    assert len(logged) == 2 and sum(logged) * 2 * 2 == targets  # each the mean over 2 steps of 2 microbatches
    stored = [log for log in trainer.state.log_history if "seen" in log]
    seen = [log["seen"] for log in stored]
    assert len(seen) == 8 and seen == sorted(seen) and seen[-1] == trainer.seen == targets
    assert [log["step"] for log in stored] == [0, 0, 1, 1, 2, 2, 3, 3]  # as compute_loss of Trainer logs them


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.b(self.drop(self.a(x).tanh()))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def tiny_run(kind, folder, *, events=None, prepare=None, mixin=object, nan=(), collate=None, **options):
    """(logs, weights, what ``events`` kept) of six steps; ``events``: functions of (trainer, step) by event."""
    set_seed(0)
    generator = torch.Generator().manual_seed(3)
    rows = [
        {"x": torch.randn(6, generator=generator), "labels": torch.randint(3, (), generator=generator)}
        for _ in range(32)
    ]
    for i in nan:
        rows[i]["x"] *= float("nan")
    defaults = dict(per_device_train_batch_size=2, max_steps=6, logging_steps=1, save_strategy="no", learning_rate=0.01)
    args = TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **(defaults | options))
    own = {"passes": "exact"} if kind is GraphTrainer else {}
    bases = (mixin, kind) if mixin is not object else (kind,)
    trainer = type("Own", bases, {})(model=Tiny(), args=args, train_dataset=rows, data_collator=collate, **own)
    trainer.kept = []

    def called(function):
        return lambda self, args, state, control, **kwargs: function(trainer, state.global_step)

    made = {event: called(function) for event, function in (events or {}).items()}
    trainer.add_callback(type("Calls", (transformers.TrainerCallback,), made)())
    if prepare is not None:
        prepare(trainer)
    trainer.train()
    logs = [[log.get(name) for name in ("loss", "grad_norm", "learning_rate")] for log in trainer.state.log_history]
    return logs, [p.detach() for p in trainer.model.parameters()], trainer.kept


def same_as_plain(folder, **options):
    plain, graph = (tiny_run(kind, folder / kind.__name__, **options) for kind in (Trainer, GraphTrainer))
    torch.testing.assert_close(graph, plain, rtol=0, atol=0, equal_nan=True)


def limits(trainer, step):
    trainer.args.max_grad_norm = {2: 0.1, 4: 0.0}.get(step, trainer.args.max_grad_norm)


def many_limits(trainer, step):
    trainer.args.max_grad_norm = 0.1 * (step + 1)


def replace_optimizer(trainer, step):
    if step == 2:
        trainer.optimizer = trainer.accelerator.prepare(torch.optim.SGD(trainer.model.parameters(), lr=0.1))


def clip_values(trainer, step=2):
    def clip(parameters, max_norm, norm_type=2):
        torch.nn.utils.clip_grad_value_(list(parameters), 0.01)
        return torch.tensor(1.0)

    if step == 2:
        trainer.accelerator.clip_grad_norm_ = clip


def wrap_clipping(trainer, step):
    before = trainer.accelerator.clip_grad_norm_
    if step == 2:
        trainer.accelerator.clip_grad_norm_ = lambda parameters, *args: before(parameters, 0.1)


def keep_gradients(trainer, step):
    trainer.kept.append([p.grad.clone() for p in trainer.model.parameters()])


def halve(trainer):
    callback = transformers.TrainerCallback()
    callback.on_pre_optimizer_step = lambda *args, **kwargs: trainer.model.b.bias.grad.zero_().sum().item() or None
    trainer.add_callback(callback)


class ClipsValues:
    def _clip_grad_norm(self, model):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return torch.tensor(1.0)


class ScheduleFree(torch.optim.SGD):
    @torch.no_grad()
    def train(self):
        for p in self.param_groups[0]["params"]:
            p.mul_(1.01)


def schedule_free(trainer):
    trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=0.1)


def step_by_hand(trainer):
    plain = trainer.training_step

    def training_step(*args, **kwargs):
        loss = plain(*args, **kwargs)
        trainer.model.a.weight.grad.mul_(0.1)
        return loss

    trainer.training_step = training_step


def fade_gradients(trainer):
    def zero_grad(set_to_none=True):
        for param in trainer.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    trainer.model.zero_grad = zero_grad


def encoded(rows):
    return transformers.BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


class ReadsAttributes:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)["loss"] * (2 if hasattr(inputs, "labels") else 1)


@pytest.mark.parametrize(
    "options",
    [
        {"events": {"on_step_end": limits}, "max_grad_norm": 0.3},
        {"events": {"on_step_end": many_limits}, "max_steps": 12},
        {"events": {"on_step_end": replace_optimizer}},
        {"events": {"on_step_end": clip_values}},
        {"events": {"on_step_end": wrap_clipping}},
        {"prepare": clip_values},
        {"mixin": ClipsValues},
        {"events": {"on_optimizer_step": keep_gradients}, "gradient_accumulation_steps": 2},
        {"prepare": halve},
        {"prepare": schedule_free},
        {"prepare": step_by_hand},
        {"prepare": fade_gradients},
        {"prepare": fade_gradients, "gradient_accumulation_steps": 2},
        {"mixin": ReadsAttributes, "collate": encoded},
        {"nan": (5, 12), "gradient_accumulation_steps": 2, "max_steps": 8},
        {"nan": (5, 12), "gradient_accumulation_steps": 4, "logging_steps": 3},
        {"nan": (5, 12), "gradient_accumulation_steps": 2, "logging_nan_inf_filter": False},
        {"gradient_accumulation_steps": 4, "logging_steps": 3},
    ],
)
@pytest.mark.filterwarnings("ignore:.*captured again")
def test_what_changes_between_steps_is_followed(tmp_path, options):
    same_as_plain(tmp_path, **options)


def scale_backward(trainer, step=2):
    plain = trainer.accelerator.backward
    if step == 2:
        trainer.accelerator.backward = lambda loss, **kwargs: plain(loss * 0.1, **kwargs)


def in_a_tuple(rows):
    return tuple(encoded(rows).values())


class ReadsWhetherItIsTheLast:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)["loss"] * (2 if self.accelerator.sync_gradients else 1)


class Prepares:
    """In `_prepare_inputs` something happens between the microbatches of a step."""

    def _prepare_inputs(self, inputs):
        self.happens()
        return super()._prepare_inputs(inputs)


class Draws(Prepares):
    def happens(self):
        torch.rand(1)


class Decays(Prepares):
    def happens(self):
        with torch.no_grad():
            self.model.b.bias.mul_(0.9)


@pytest.mark.parametrize(
    ("mixin", "changed"),
    [
        (ReadsWhetherItIsTheLast, r"end, loss_fn.self.accelerator.gradient_state.sync_gradients changed from"),
        (Draws, "random numbers are drawn between the microbatches"),
        (Decays, "the model is changed"),
    ],
)
def test_what_happens_between_microbatches(tmp_path, mixin, changed):
    same_as_plain(tmp_path, mixin=mixin)
    with pytest.raises(ValueError, match=changed):
        tiny_run(GraphTrainer, tmp_path, mixin=mixin, gradient_accumulation_steps=2)


def test_draws_between_microbatches_of_a_model_that_draws_nothing(tmp_path):
    def without_dropout(trainer):
        trainer.model.drop.p = 0.0

    same_as_plain(tmp_path, mixin=Draws, prepare=without_dropout, gradient_accumulation_steps=2)


class StoresRates:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs)["loss"]
        self.kept.append((self.optimizer.param_groups[0]["lr"], loss.item()))
        return loss


@pytest.mark.filterwarnings("ignore:.*captured again")
def test_a_rate_that_changes_before_it_is_stored_is_said(tmp_path):
    with pytest.warns(UserWarning, match=r"\['lr'\] changed from 0.01 to .* before compute_loss stored it of the last"):
        tiny_run(GraphTrainer, tmp_path, mixin=StoresRates)


class Counts:
    count = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.count += 1
        return model(**inputs)["loss"] * self.count


def test_a_loss_that_depends_on_a_count(tmp_path):
    with pytest.raises(CaptureError, match=r"self\.count counts in Python: nothing -> 1"):
        tiny_run(GraphTrainer, tmp_path, mixin=Counts)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prepare": scale_backward}, "accelerator.backward was replaced"),
        ({"events": {"on_step_end": scale_backward}}, "accelerator.backward was replaced"),
        ({"collate": in_a_tuple}, "returned a tuple; let it return a dict"),
        ({"optim": "lomo"}, "'lomo' updates inside backward"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["a"]}, "layerwise' updates inside backward"),
    ],
)
def test_what_a_graph_would_leave_out_is_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        tiny_run(GraphTrainer, tmp_path, **options)
