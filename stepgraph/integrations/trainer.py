"""`GraphTrainer`: Hugging Face's ``Trainer`` whose steps are captured graphs, clipping and optimizer included.

``Trainer`` calls ``training_step`` for each microbatch, then clips, updates and sets gradients to None. Here
the microbatches of a step wait for its last one; that call runs the whole step and leaves no gradients, so that what
``Trainer`` does afterwards changes nothing: an optimizer without gradients has nothing to update.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepgraph.capture.batch import flatten_batch, form, rebuilt
from stepgraph.integrations.reads import Reads
from stepgraph.passes import Passes
from stepgraph.step import CapturedStep, capture

try:
    from transformers import Trainer
    from transformers.training_args import ParallelMode
except ImportError as error:
    raise ImportError("GraphTrainer needs transformers and accelerate: pip install 'stepgraph[hf]'") from error

logger = logging.getLogger(__name__)

#: Where the number of targets of the whole step travels in the batch, beside the model's inputs.
_TARGETS = "num_items_in_batch"


class GraphTrainer(Trainer):
    """As ``transformers.Trainer``, each training step as one graph.

    Args:
        passes: as in `stepgraph.capture`: ``"exact"`` trains bit for bit as ``Trainer``, ``"default"`` is the fast one.
        args, kwargs: those of ``Trainer``.

    With ``gradient_accumulation_steps=N``, ``Trainer`` divides each loss by the number of targets of all microbatches;
    here it is multiplied by N before the graph divides by N, which rounds unless N is a power of 2. Where the N differ
    in shape or in a scalar, a graph computes the gradients of each, and ``Trainer`` clips and updates in eager mode.
    Callbacks of ``on_pre_optimizer_step`` and ``on_optimizer_step`` otherwise run behind the update.

    Raises:
        ValueError: options that a captured step cannot serve: fp16's scaler, several GPUs in ``Trainer``'s own ways,
            ``torch_compile``.
    """

    def __init__(self, *args: Any, passes: Passes = "default", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._passes = passes
        self._steps: dict[int, CapturedStep] = {}
        self._apart: dict[int, CapturedStep] = {}
        self._waiting: list[dict[str, Any]] = []
        self._reads, self._told = Reads(), False
        self._refuse()

    def _refuse(self) -> None:
        """Raise for options of ``Trainer`` that a captured step cannot serve."""
        args = self.args
        if args.fp16:
            raise ValueError("fp16=True scales losses by a GradScaler, which a captured step has not; use bf16=True")
        if args.torch_compile:
            raise ValueError("torch_compile=True, but the captured step is compiled already; drop torch_compile")
        if args.parallel_mode is not ParallelMode.NOT_PARALLEL or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                f"GraphTrainer runs on one device, and these arguments ask for {args.parallel_mode.value}; start it "
                "with CUDA_VISIBLE_DEVICES=0, or shard with stepgraph.parallel.parallelize in a loop of your own"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``."""
        for of_another_run in (self._steps, self._apart, self._waiting, self._reads):
            of_another_run.clear()
        return super().train(*args, **kwargs)

    @property
    def captured(self) -> CapturedStep | None:
        """The captured step, once there is one; with a shorter last step of an epoch, the first of them."""
        return next(iter(self._steps.values()), None)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run the step whose last microbatch is ``inputs``; for one before, keep it. Returns the loss, detached.

        The loss of a step comes with its last microbatch; the others give 0, and ``Trainer`` logs the sum.
        """
        model.train()
        # A number of targets without dimensions is the same for every microbatch.
        self._waiting.append({**self._prepare_inputs(inputs), _TARGETS: num_items_in_batch})
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        microbatches, self._waiting = self._waiting, []
        self._drop_outdated()
        if len({_form(batch) for batch in microbatches}) > 1:
            return self._gradients_apart(model, microbatches)
        batch, count = _together(microbatches), len(microbatches)
        if count not in self._steps:
            self._steps[count] = self._capture(model, batch, count)
        step = self._steps[count]
        loss = step(batch)
        # What is logged: gradients are clipped already, and gone.
        self.accelerator.clip_grad_norm_ = lambda *args, **kwargs: step.metrics["grad_norm"]
        return loss

    def _drop_outdated(self) -> None:
        """Forget the captures if something has changed that ``compute_loss`` read of the trainer."""
        change = self._reads.change()
        if change is None:
            return
        if not self._told:
            self._told = True
            logger.warning(
                f"{change}, and compute_loss reads it: the step is captured again, and so at each change; put what "
                "changes from step to step into the batch, as a tensor"
            )
        for outdated in (self._steps, self._apart, self._reads):
            outdated.clear()

    def _gradients_apart(self, model: nn.Module, microbatches: list[dict[str, Any]]) -> torch.Tensor:
        """Leave the gradients of microbatches of several shapes to ``Trainer``, which clips and applies them."""
        vars(self.accelerator).pop("clip_grad_norm_", None)
        if not self._apart:
            logger.warning(
                "microbatches of one step differ in shape, or in values that are no rows: a graph each computes their "
                "gradients, which are clipped and applied in eager mode; pad to one length and drop the last batch for "
                "one graph a step"
            )
        count, total = len(microbatches), 0.0
        if count not in self._apart:
            loss_fn = self._loss_fn(lambda loss, is_part: loss if is_part else loss / count)
            self._apart[count] = capture(model, loss_fn, microbatches[0], passes=self._passes)
        for batch in microbatches:
            total = total + self._apart[count](batch)
        return total

    def _capture(self, model: nn.Module, batch: dict[str, Any], count: int) -> CapturedStep:
        # Losses that add up to the step's: undo that the graph takes their mean.
        loss_fn = self._loss_fn(lambda loss, is_part: loss * count if is_part and count > 1 else loss)
        # The norm is logged where nothing is clipped too.
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else float("inf")
        return capture(
            model, loss_fn, batch, self.optimizer, max_grad_norm=limit, accumulate=count, passes=self._passes
        )

    def _loss_fn(self, scaled: Callable[[torch.Tensor, bool], torch.Tensor]) -> Callable:
        """``compute_loss`` as a function of the model and a batch; ``scaled(loss, is_part)`` is what it returns."""

        def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            inputs = dict(batch)
            targets = inputs.pop(_TARGETS)
            with self._reads.noted(self, self.state, self.args), self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=targets)
            return scaled(loss, self._is_part_of_the_step(targets))

        return loss_fn

    def _is_part_of_the_step(self, targets: Any) -> bool:
        """Whether ``compute_loss`` gives a microbatch's share of the step's loss, as `Trainer.training_step` asks."""
        # Since transformers 5.20; before, Trainer does not ask, whatever a subclass says.
        said = self.loss_is_scaled_for_ga if hasattr(Trainer, "loss_is_scaled_for_ga") else None
        counted = self.model_accepts_loss_kwargs and targets is not None
        return counted or self.compute_loss_func is not None if said is None else said


def _form(microbatch: dict[str, Any]) -> tuple:
    """What microbatches of one step must share to run as one graph: shapes of tensors, and values that have no rows.

    Whether two scalar tensors are equal is on the device; that of the step's targets is one tensor for all.
    """
    leaves, spec = flatten_batch(microbatch)
    return spec, *map(_form_of_leaf, leaves)


def _form_of_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return form(leaf)
    return (leaf.shape, leaf.dtype) if leaf.ndim else id(leaf)


def _together(microbatches: list[dict[str, Any]]) -> dict[str, Any]:
    """Microbatches of one form one after the other, along the first dimension of each tensor that has one."""
    if len(microbatches) == 1:
        return microbatches[0]
    flat, (_, spec) = [flatten_batch(batch)[0] for batch in microbatches], flatten_batch(microbatches[0])
    joined = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].ndim else parts[0]
        for parts in zip(*flat, strict=True)
    ]
    return rebuilt(microbatches[0], joined, spec)
