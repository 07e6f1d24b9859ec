"""`GraphTrainer` with losses, callbacks, steps and optimizers of one's own."""

from abc import ABC, abstractmethod

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402

import stepgraph  # noqa: E402
from stepgraph import CaptureError  # noqa: E402
from stepgraph.integrations import GraphTrainer  # noqa: E402
from tests.integrations.trainers import both, check_same, encoded, qwen, sequences, trained  # noqa: E402


class Weighs(ABC):
    @abstractmethod
    def weight(self, inputs):
        """What the loss is multiplied with."""


class Scaled(Weighs):
    """A loss times what its batch, nested, has as a scalar."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs["of"]).loss * self.weight(inputs)

    def weight(self, inputs):
        return inputs["scale"]


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
    assert "Wavers.step" in said and "use optim='adamw_torch_fused'" in said and "\n" not in said
    assert ends[1][1].captured is None


class CountsAlways(torch.optim.Optimizer):
    """Counts each call of ``step``, also without gradients, as schedule-free optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


def test_an_optimizer_that_counts_without_gradients_counts_each_step_once(tmp_path):
    ends = []
    for kind in (Trainer, GraphTrainer):
        model = qwen()
        options = {"optimizers": (CountsAlways(model.parameters()), None)}
        ends.append(trained(kind, tmp_path / kind.__name__, model, count=8, trainer_options=options))
    check_same(*ends)
    assert ends[1][1].captured is not None and ends[1][1].optimizer.param_groups[0]["k"] == 4


def test_a_callback_that_may_change_gradients_is_named(tmp_path, caplog):
    class Watches(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            pass

    trained(GraphTrainer, tmp_path, count=4, trainer_options={"callbacks": [Watches()]})
    assert "Watches.on_pre_optimizer_step may change gradients" in caplog.text


def test_an_error_of_the_loss_is_not_taken_for_the_optimizers(tmp_path, caplog):
    class Reads:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs).loss
            return loss if loss > 1e9 else loss * 2

    with pytest.raises(CaptureError, match="reads a value of the step in Python, and the loss depends on it"):
        of_kind(Reads, output_dir=str(tmp_path))
    assert "in eager mode" not in caplog.text


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
