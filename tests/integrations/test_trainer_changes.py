"""What changes between the steps of a `GraphTrainer`, or between microbatches, is followed or refused."""

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments, set_seed  # noqa: E402

import stepgraph  # noqa: E402
from stepgraph import CaptureError  # noqa: E402
from stepgraph.integrations import GraphTrainer  # noqa: E402
from tests.integrations.trainers import encoded, qwen, sequences  # noqa: E402


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


def step_twice(trainer, step=2):
    once = trainer.optimizer.step
    if step == 2:
        trainer.optimizer.step = lambda: (once(), once())


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
        {"events": {"on_step_end": step_twice}},
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


class ReadsLabels:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)["loss"] * (1 + inputs["labels"].max().item())


def test_values_that_differ_between_the_microbatches_of_a_later_step(tmp_path, caplog):
    def alike_at_first(rows):
        return encoded([{**row, "labels": row["labels"] * (len(trainers[-1].kept) > 1)} for row in rows])

    trainers = []
    same_as_plain(
        tmp_path,
        mixin=ReadsLabels,
        gradient_accumulation_steps=2,
        prepare=trainers.append,
        collate=alike_at_first,
        events={"on_step_end": lambda trainer, step: trainer.kept.append(step)},
    )
    assert trainers[-1].captured is not None and "differ between its 2 microbatches" in caplog.text


@pytest.mark.parametrize("modules", [("",), ("", ".clip_grad")])
def test_clipping_of_torch_that_is_replaced(modules, tmp_path, monkeypatch):
    plain = torch.nn.utils.clip_grad_norm_
    replaced = lambda parameters, limit, *args, **kwargs: plain(list(parameters), 0.1 * limit)  # noqa: E731
    for module in modules:
        monkeypatch.setattr(f"torch.nn.utils{module}.clip_grad_norm_", replaced)
    same_as_plain(tmp_path)


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
    with pytest.warns(UserWarning, match=r"\['lr'\] changed from 0.01 to .* before compute_loss read it for the last"):
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


def test_a_hook_that_checkpointing_adds_again_in_each_step_costs_no_capture():
    model, rows = qwen(), encoded(sequences(2))
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = stepgraph.capture(model, lambda model, rows: model(**rows).loss, dict(rows), optimizer, passes="exact")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.enable_input_require_grads()
            step(dict(rows))
