"""`GraphTrainer`: Hugging Face's ``Trainer`` whose steps are captured graphs, clipping and optimizer included.

``Trainer`` calls ``training_step`` for each microbatch, then clips, updates and sets gradients to None. Here
the microbatches of a step wait for its last one; that call runs the whole step and leaves no gradients, so that what
``Trainer`` does afterwards changes nothing: an optimizer without gradients has nothing to update.
"""

import contextlib
import gc
import inspect
import logging
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture.batch import flatten_batch, form, masks_of_ones, rebuilt, refusing_masks
from stepgraph.capture.python.metrics import EACH, each, means, reported
from stepgraph.capture.python.replay import is_probing
from stepgraph.compat.replaced import replaced
from stepgraph.errors import UnlikeError, require_type, warn_caller
from stepgraph.integrations.lengths import PadToLengths
from stepgraph.parallel import Mesh, gloo_group, layouts, whole_state
from stepgraph.parallel.ranks import Ranks
from stepgraph.passes import Passes, Target, prepare, resolve
from stepgraph.run.bound import RandomState
from stepgraph.step import CapturedStep, capture

try:
    from accelerate import Accelerator
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
    from transformers.trainer_pt_utils import nested_gather
    from transformers.training_args import ParallelMode
except ImportError as error:
    raise ImportError("GraphTrainer needs transformers and accelerate: pip install 'stepgraph[hf]'") from error

from stepgraph.integrations import ranks

logger = logging.getLogger(__name__)

#: Where the number of targets of the whole step travels in the batch. GRPO's batches have a number of their own.
_TARGETS = "Trainer's num_items_in_batch"
_MAY_CHANGE = " may change gradients"
#: Graphs of a run, after which an optimizer or limit that changes again is eager.
_CAPTURES = 8
#: Replaces TRL's own, and stays the same object, because a graph depends on the functions that its step reads.
_without_triton, _untimed = lambda _: False, lambda *_: contextlib.nullcontext()
#: The names in TRL's ``training_step`` where it leaves gradients alone: it offloads (an option, refused), or counts.
_LEAVE_GRADIENTS = (
    {"super", "training_step", "maybe_activation_offload_context"},
    {"super", "training_step", "time", "perf_counter", "_step", "_current_train_step_time", "_metrics", "append"}
    | {"current_gradient_accumulation_steps"},
)


class _TrainingStep:
    _captured_step: Callable[..., torch.Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces ``Trainer.training_step``, also if `GraphTrainer` is a mix-in."""
        return self._captured_step(*args, **kwargs)


class _StepOfTrainer(ABCMeta):
    """Puts `_TrainingStep` right before ``Trainer`` in the MRO. Derived from `ABCMeta` for abstract trainers."""

    def mro(cls) -> list[type]:
        order = [base for base in super().mro() if base is not _TrainingStep]
        order.insert(order.index(Trainer), _TrainingStep)
        return order


class GraphTrainer(Trainer, metaclass=_StepOfTrainer):
    """``transformers.Trainer`` with each training step as one graph. As the first base it does the same for a
    subclass of ``Trainer``: ``class Graph(GraphStep, SFTTrainer): pass``.

    Args:
        passes: as in `stepgraph.capture`: ``"exact"`` trains bit for bit as ``Trainer``, ``"default"`` is the fast one.
        mesh: under torchrun or ``accelerate launch``, how ranks share the model: ``"fsdp=2"``, ``"ddp=2"``,
            ``"hsdp=2x2"``, ``"fsdp=2,ep=2"``, ``"fsdp=2,cp=2"``. None: as ``args`` say, sharded with ``fsdp`` and
            replicated without.
        parallel: further keyword arguments of `stepgraph.parallel.parallelize`, such as ``expert_capacity``.

    With ``gradient_accumulation_steps=N``, ``Trainer`` divides each loss by the number of targets of all microbatches.
    Here the loss is multiplied by N before the graph divides by N, which rounds unless N is a power of 2. If the N
    microbatches differ in shape, in a scalar, in values that forward reads, or, with exact passes in one process, in
    masks that eager drops, a graph computes the gradients of each, and ``Trainer`` clips and updates in eager mode. The
    same happens if something may read and change gradients: a callback's ``on_pre_optimizer_step``,
    ``on_optimizer_step`` or ``on_substep_end``, a replaced ``training_step``, or clipping that is not ``Trainer``'s.
    Another ``max_grad_norm`` or optimizer is captured again.

    Raises ``ValueError`` for options that a captured step does not support: fp16's scaler, several GPUs in one process,
    DeepSpeed, FSDP1, offload, ``torch_compile``, optimizers that update in backward, a replaced ``backward``.
    """

    def __init__(
        self,
        *args: Any,
        passes: Passes = "default",
        mesh: str | None = None,
        parallel: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        require_type("parallel", parallel or {}, Mapping, "use keyword arguments of parallelize, by name")
        self._asked_mesh, self._parallel = mesh, dict(parallel or {})
        self._mesh: Mesh | None = None
        self._whole: dict[str, torch.Tensor] | None = None  # weights, while they are saved
        self._loads_from = ""
        super().__init__(*args, **kwargs)
        self._passes = tuple(passes) if isinstance(passes, Iterable) and not isinstance(passes, str) else passes
        target = Target(self.args.device.type)
        self._is_exact = all(one.tier == "exact" for one in resolve(self._passes, (), target))
        #: By what the graph has taken from the trainer: number of microbatches, their class, limit and optimizer.
        self._steps: dict[tuple, CapturedStep] = {}
        self._apart: dict[tuple, CapturedStep] = {}
        self._uncaptured: set[tuple] = set()
        self._waiting: list[dict[str, Any]] = []
        #: As the first microbatch of a step comes: what says whether Python reads anything else later, how often each
        #: tensor of the model was written, states of generators. Then whether these have moved before a later one.
        self._at_first: tuple[list[Callable[[], str | None]], list[int], list[torch.Tensor]] = [], [], []
        self._drawn = False
        self._reported: dict[str, list[torch.Tensor]] = {}
        self._once: dict[str, Callable] = {}  # by name, undo `_replace_once`
        self._class: type = dict
        #: What compute_loss stores of the latest step, what says whether it would read anything else by then, and the
        #: number of that step and its epoch.
        self._after: tuple[Callable[[], None], Callable[[], str | None], tuple[int, float | None]] | None = None
        self._storing = False
        self._refuse()
        self._shard(self.model)

    def _refuse(self) -> None:
        """Raise for options of ``Trainer`` that a captured step cannot serve."""
        args = self.args
        if args.fp16:
            raise ValueError("fp16=True scales losses by a GradScaler, which a captured step lacks; use bf16=True")
        name = str(getattr(args.optim, "value", args.optim))
        if "lomo" in name or "layerwise" in name:
            raise ValueError(f"optim={name!r} updates inside backward, which a graph replaces; use 'adamw_torch'")
        if any(option == "underflow_overflow" for option in args.debug):
            raise ValueError(
                "debug='underflow_overflow' reads every activation in Python, which a graph does not run; drop it, or "
                "debug with transformers.Trainer"
            )
        if args.torch_compile:
            raise ValueError("torch_compile=True, but the captured step is compiled already; drop torch_compile")
        if args.parallel_mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.DISTRIBUTED):
            raise ValueError(
                f"{args.n_gpu} GPUs in one process ({args.parallel_mode.value}): start one process for each, with "
                "torchrun --nproc-per-node, or one alone with CUDA_VISIBLE_DEVICES=0"
            )
        if getattr(args, "use_adaptive_entropy", False):
            raise ValueError(
                "use_adaptive_entropy=True changes the loss by entropies that Python reads, which no graph can follow; "
                "drop it and set entropy_coef"
            )
        offloading = getattr(self, "maybe_activation_offload_context", None)
        if offloading is not None and not isinstance(offloading, contextlib.nullcontext):
            raise ValueError(
                "activation_offloading=True is part of TRL's training_step, which a graph replaces; drop it"
            )
        if self._parallel and self._spec is None:
            raise ValueError(f"parallel={self._parallel} changes nothing in one process: start several, or drop it")
        if self._spec is not None and self._spec.cp > 1:
            self._refuse_losses_of_logits()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "the Accelerator wraps models by DeepSpeed or FSDP; ask for shards by TrainingArguments(fsdp=True) or "
                "GraphTrainer(mesh='fsdp=2')"
            )

    def _refuse_losses_of_logits(self) -> None:
        """Where ranks share sequences a model computes its own loss, from labels that it shifts before it splits."""
        bases = type(self).__mro__
        owners = [b for b in bases[: bases.index(Trainer)] if b is not GraphTrainer and "compute_loss" in vars(b)]
        found = {
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_loss_func": self.compute_loss_func is not None,
        }
        for owner in owners:
            names = inspect.unwrap(vars(owner)["compute_loss"]).__code__.co_names
            found[f"{owner.__name__}.compute_loss"] = "logits" in names
        for name, reads in found.items():
            if reads:
                raise ValueError(
                    f"{name} computes a loss from the logits of whole sequences, and a rank of cp has only a part; "
                    "drop it for the model's own loss, or drop cp"
                )

    # Several ranks

    def create_accelerator_and_postprocess(self) -> None:
        """Like ``Trainer``'s, but `_shard` shards the model instead of a wrapper of accelerate's."""
        self._spec = ranks.mesh_spec(self.args, self._asked_mesh)
        with ranks.plain_ranks(self.args):
            super().create_accelerator_and_postprocess()
        if self._spec is None:
            gather = self.accelerator.gather_for_metrics
            self.accelerator.gather_for_metrics = partial(_gathered_for_metrics, gather)
        else:
            if self._spec.cp > 1:
                ranks.share_data(self.accelerator, self._spec)
            prepare = self.accelerator.prepare_model
            self.accelerator.prepare_model = lambda model, *_, **__: prepare(
                model, device_placement=False, evaluation_mode=True
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._spec is None:  # shards are made there, and the whole model may not fit
            super()._move_model_to_device(model, device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As ``Trainer``'s; the new model is sharded."""
        model = super().call_model_init(trial)
        self._shard(model)
        return model

    def _shard(self, model: nn.Module) -> None:
        if self._spec is None or layouts(model):
            return
        if self._mesh is None:
            self._mesh, self._ranks = Mesh(self._spec, self.args.device.type), Ranks(group=gloo_group())
        new = ranks.shard(model, self._mesh, self.args, self._parallel)
        if self.optimizer is not None:
            ranks.swap_parameters(self.optimizer, new)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As ``Trainer``'s, with the parameter groups of one process."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if made and self._mesh is not None:
            ranks.join_groups(optimizer, self.model)
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``Trainer``'s: rank 0 writes whole weights. All ranks must call."""
        if self._mesh is not None:
            self._whole = whole_state(self.model, keep=self.args.should_save)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._mesh is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = ranks.whole_optimizer(self.optimizer, self.model, keep=self.args.should_save)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        files = [os.path.join(checkpoint or "", name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        if self._mesh is None or checkpoint is None or not all(map(os.path.isfile, files)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = (torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files)
        ranks.load_optimizer(self.optimizer, self.model, optimizer)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._loads_from = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._loads_from = self.state.best_model_checkpoint
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Checkpoints name some weights in other ways than modules do, such as experts', which Trainer leaves out.
        if load_result.missing_keys and load_result.unexpected_keys:
            load_result = ranks.load_converted(self.model, self._loads_from, self.args)
        super()._issue_warnings_after_load(load_result)

    def _alike(self, microbatches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The microbatches of a step, of the same forms on all ranks: their graphs then hold the same collectives.

        With `PadToLengths` as the data collator, all are padded to the step's longest; else others are refused.
        """
        if isinstance(self.data_collator, PadToLengths):
            longest = self._ranks.gather(lambda: self.data_collator.longest(microbatches))
            most = {name: max(of.get(name, 0) for of in longest) for name in set().union(*longest)}
            microbatches = [self.data_collator.lengthened(batch, most) for batch in microbatches]
        forms = self._ranks.gather(lambda: [*map(_shown, microbatches), f"{len(set(map(_form, microbatches)))} forms"])
        for rank, found in enumerate(forms):
            if found != forms[0]:
                first, other = next((a, b) for a, b in zip(forms[0], found, strict=False) if a != b)
                raise ValueError(
                    f"the batches of rank 0 and of rank {rank} differ in form ({first} and {other}), and ranks run one "
                    "graph: use data_collator=PadToLengths(lengths, collate), which pads all ranks to one length, and "
                    "dataloader_drop_last=True where they differ in rows"
                )
        return microbatches

    def train(self, *args: Any, **kwargs: Any) -> Any:
        for of_another_run in (self._steps, self._apart, self._uncaptured, self._waiting, self._reported):
            of_another_run.clear()
        self._after = None
        prepare(self._passes, (), Target(self.args.device.type))  # while the data and the optimizer are set up
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._mesh is not None:  # process groups close once no CUDA graph holds NCCL's kernels
                for step in (*self._steps.values(), *self._apart.values()):
                    step.release()
                gc.collect()

    @property
    def captured(self) -> CapturedStep | None:
        """The captured step, once there is one; with a shorter last step of an epoch, the first of them."""
        return next(iter(self._steps.values()), None)

    def _captured_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run the step whose last microbatch is ``inputs``; for one before, keep it. Returns the loss, detached.

        The loss of a step comes with its last microbatch; the others give 0, and ``Trainer`` logs the sum.
        """
        if _is_replaced(self.accelerator, "backward", Accelerator):
            raise ValueError("accelerator.backward was replaced, and a captured step does not call it; scale the loss")
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepared(model, inputs)
        if not isinstance(inputs, Mapping):
            raise ValueError(f"the data collator returned a {type(inputs).__name__}; let it return a dict of tensors")
        self._class = type(inputs)
        # A number of targets without dimensions is the same for every microbatch.
        self._waiting.append({**inputs, _TARGETS: num_items_in_batch})
        between = self._calls("on_substep_end") or self._own_step()
        if self.args.gradient_accumulation_steps > 1 and between:
            if self._mesh is not None:
                raise ValueError(
                    "over several GPUs a captured step has no gradients between microbatches: remove the callback with "
                    "on_substep_end, or the training_step of your own"
                )
            with _trl_in_a_graph():
                count = self.current_gradient_accumulation_steps
                return self._gradients_apart(model, [self._waiting.pop()], count, between + _MAY_CHANGE)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        microbatches, self._waiting = self._waiting, []
        if self._mesh is not None:
            microbatches = self._alike(microbatches)
        random = self._random() if self._drawn else []
        with _trl_in_a_graph():
            loss = self._graph_step(model, microbatches)
        if random and not all(map(torch.equal, random, self._random())):
            raise ValueError(
                "random numbers are drawn between the microbatches of a step, which run as one graph at its end, and "
                "the model draws too, in another order than under Trainer: draw in the data collator"
            )
        return loss

    def _prepared(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a microbatch. Those of a step run at its end: what changes between them must not matter."""
        inputs = self._prepare_inputs(inputs)
        if not self._waiting and self.accelerator.sync_gradients:  # the only one
            self._drawn = False
            return inputs
        written = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
        random = self._random()
        if not self._waiting:
            reads = [step.from_now() for step in (*self._steps.values(), *self._apart.values())]
            self._at_first, self._drawn = (reads, written, random), False
        reads, written_first, random_first = self._at_first
        changed = next((said for changed in reads if (said := changed())), None)
        if changed or written != written_first:
            raise ValueError(
                "between the microbatches of a step, which run as one graph at its end, "
                f"{changed or 'the model is changed'}: do that between steps, such as in on_step_begin, or set "
                "gradient_accumulation_steps=1"
            )
        self._drawn = self._drawn or not all(map(torch.equal, random_first, random))
        return inputs

    def _random(self) -> list[torch.Tensor]:
        """The states of torch's generators."""
        device = self.args.device
        return [*RandomState([device] if device.type == "cuda" else []).states().values()]

    def _graph_step(self, model: nn.Module, microbatches: list[dict[str, Any]]) -> torch.Tensor:
        for put_back in self._once.values():  # what has not been called
            put_back()
        count, optimizer = len(microbatches), getattr(self.optimizer, "optimizer", self.optimizer)
        key = count, self._class, max(self.args.max_grad_norm, 0), optimizer
        often = key not in self._steps and len(self._steps) >= _CAPTURES
        changes = self._changes_gradients(model)
        if key in self._uncaptured or often or changes or not self._are_alike(microbatches):
            why = changes + _MAY_CHANGE if changes else f"{_CAPTURES} limits or optimizers had graphs" if often else ""
            return self._gradients_apart(model, microbatches, count, why)
        batch = _together(microbatches)
        with refusing_masks() if self._is_exact and self._mesh is None else contextlib.nullcontext():
            if key not in self._steps:
                try:
                    self._steps[key] = self._capture(model, batch, count)
                except ValueError as error:  # from the optimizer, the loss, or microbatches that differ
                    return self._without_optimizer(model, microbatches, key, error)
            step = self._steps[key]
            try:
                loss = step(batch)
            except UnlikeError as error:  # it captures again
                return self._without_optimizer(model, microbatches, key, error)
        if EACH in step.metrics:
            loss = self._add_up(loss, step.metrics[EACH].unbind())
        self._keep_metrics(step)
        self._store(step)
        # The graph has clipped and updated. Trainer logs the norm; its own update would count this step again, where
        # an optimizer (schedulefree's) counts without gradients.
        self._replace_once(self.accelerator, "clip_grad_norm_", lambda *args, **kwargs: step.metrics["grad_norm"])
        self._replace_once(self.optimizer, "step", lambda *args, **kwargs: compat.mark_stepped(self.optimizer))
        return loss

    def _are_alike(self, microbatches: list[dict[str, Any]]) -> bool:
        """Whether microbatches can run as one graph; where it is exact, eager also drops the same masks of all."""
        if self._is_exact and self._mesh is None and len({masks_of_ones(batch) for batch in microbatches}) > 1:
            return False
        return len({_form(batch) for batch in microbatches}) == 1

    def _without_optimizer(
        self, model: nn.Module, microbatches: list[dict[str, Any]], key: tuple, error: ValueError
    ) -> torch.Tensor:
        """Gradients alone by graphs, because of ``error``, which is raised if it is theirs too."""
        of_optimizer = f"{error}".startswith(type(key[-1]).__qualname__)
        fix = "use optim='adamw_torch_fused'" if of_optimizer else "change that"
        if self._mesh is not None:  # an update that no graph has may need whole parameters
            raise ValueError(f"{error}; over several ranks {fix}") if of_optimizer else error
        try:
            loss = self._gradients_apart(model, microbatches, key[0], f"{error}", fix)
        except ValueError:
            raise error from None
        self._uncaptured.add(key)
        return loss

    def _replace_once(self, owner: Any, name: str, function: Callable) -> None:
        """Let ``Trainer``'s next call of ``owner.name`` be ``function``; what is wrapped later is the owner's own."""
        before = vars(owner).get(name)

        def put_back() -> None:
            if vars(owner).get(name) is once:
                vars(owner).update({name: before}) if before else vars(owner).pop(name)

        def once(*args: Any, **kwargs: Any) -> Any:
            put_back()
            return function(*args, **kwargs)

        self._once[name] = put_back
        setattr(owner, name, once)

    def _add_up(self, total: torch.Tensor, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add the losses before the last to what ``Trainer`` logs, in its order and by its rule for NaN, and return
        the last; where ``Trainer`` keeps its sum to itself (before transformers 5), the ``total``."""
        logged = getattr(self, "_tr_loss", None)
        if logged is None:
            return total
        for loss in losses[:-1]:
            if self.args.logging_nan_inf_filter:
                mean = logged / (1 + self.state.global_step - self._globalstep_last_logged)
                loss = torch.where(loss.isfinite(), loss, mean)
            logged += loss
        return losses[-1]

    def _changes_gradients(self, model: nn.Module) -> str:
        """What may change gradients or replaces the optimizer's update, or "": a callback, or a replaced
        ``training_step``, clipping, ``zero_grad`` or ``step`` of what accelerate prepared."""
        clips = getattr(nn.utils.clip_grad_norm_, "__globals__", None) is not vars(nn.utils.clip_grad)
        replaced = {
            "the replaced optimizer.step": compat.step_replaced(self.optimizer),
            "the replaced torch.nn.utils.clip_grad_norm_": clips,
            "the replaced zero_grad of the model": _is_replaced(model, "zero_grad", nn.Module),
            "the replaced accelerator.clip_grad_norm_": _is_replaced(self.accelerator, "clip_grad_norm_", Accelerator),
        }
        for name in ("_clip_grad_norm", "_get_grad_norm"):
            replaced[f"{type(self).__name__}.{name}"] = hasattr(Trainer, name) and _is_replaced(self, name, Trainer)
        found = (what for what, is_so in replaced.items() if is_so)
        by_callback = self._calls("on_pre_optimizer_step") or self._calls("on_optimizer_step")
        return by_callback or self._own_step() or next(found, "")

    def _own_step(self) -> str:
        """A ``training_step`` that may read or change gradients, one around this one or the trainer's own; or ""."""
        bases = type(self).__mro__
        steps = [vars(owner).get("training_step") for owner in bases[: bases.index(_TrainingStep)]]
        names = [set(inspect.unwrap(step).__code__.co_names) for step in steps if step is not None]
        is_own = "training_step" in vars(self) or not all(one in _LEAVE_GRADIENTS for one in names)
        return f"{type(self).__name__}.training_step" if is_own else ""

    def _calls(self, event: str) -> str:
        """The first callback that runs at ``event``, or ""."""
        found = (one for one in self.callback_handler.callbacks if _is_replaced(one, event, TrainerCallback))
        return next((f"{type(one).__name__}.{event}" for one in found), "")

    def _gradients_apart(
        self, model: nn.Module, microbatches: list[dict[str, Any]], count: int, why: str, fix: str = "leave it out"
    ) -> torch.Tensor:
        """Leave the gradients of microbatches to ``Trainer``, which clips and applies them. ``why``: no graph does."""
        if not why:
            why = "microbatches of one step differ in shape, in values that are not rows, or in masks that eager drops"
            fix = "pad to one length and give dataloader_drop_last=True"
        if self._mesh is not None:
            if self._mesh.experts is not None:
                raise ValueError(f"{why}, and with ep only a graph updates; {fix}")
            if _is_replaced(self.accelerator, "clip_grad_norm_", Accelerator):
                raise ValueError("over several GPUs a captured step clips shards: restore accelerator.clip_grad_norm_")
            self._replace_once(self.accelerator, "clip_grad_norm_", ranks.clip)
        first, losses, key = not self._apart, [], (count, self._class)
        if key not in self._apart:
            loss_fn = self._loss_fn(lambda loss, is_part: loss if is_part else loss / count)
            self._apart[key] = capture(model, loss_fn, microbatches[0], passes=self._passes, replay=self._mesh is None)
        for batch in microbatches:
            losses.append(self._apart[key](batch))
            self._keep_metrics(self._apart[key])
            self._store(self._apart[key])
        if first and self.is_world_process_zero():
            logger.warning(
                "%s: graphs compute gradients, and clipping and update run in eager mode; %s for one graph per step",
                why,
                fix,
            )
        return self._add_up(torch.stack(losses).sum(), losses)

    def _keep_metrics(self, step: CapturedStep) -> None:
        for name, value in reported(step.metrics).items():
            if value.ndim == 0:
                self._reported.setdefault(name, []).append(value)

    def _store(self, following: CapturedStep | None = None) -> None:
        """What ``compute_loss`` stores of the step before, while the GPU runs the ``following`` one."""
        if self._storing:
            return  # it logs
        state, after = self.state, self._after
        now = state.global_step, state.epoch
        stores = following is not None and following.stores
        self._after = (following.after, following.from_now(), now) if stores else None
        if after is not None:
            self._storing, (run, changed, (state.global_step, state.epoch)) = True, after
            try:
                with _trl_in_a_graph():
                    if said := changed():
                        warn_caller(f"{said} before compute_loss read it for the last step: read it in a callback")
                    run()
            finally:
                self._storing, (state.global_step, state.epoch) = False, now

    def get_total_train_batch_size(self, args: Any) -> int:
        """As ``Trainer``'s; ranks that share sequences read one batch."""
        return super().get_total_train_batch_size(args) // (1 if self._spec is None else self._spec.cp)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> tuple:
        """As ``Trainer``'s; with cp, of whole sequences."""
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if self._mesh is not None and self._mesh.spec.cp > 1:
            tokens = inputs["input_ids"].shape[1]
            loss, logits = ranks.whole_predictions(model, self._mesh, loss, logits, tokens)
        return loss, logits, labels

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._store()
        return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As ``Trainer.log``; a training loss comes with the means of what `stepgraph.metric` has reported since."""
        if is_probing():  # ``compute_loss`` logs again after the step
            return
        self._store()
        if "loss" in logs and self._reported:
            found = {
                name: nested_gather(value, self.args.parallel_mode).mean().item()
                for name, value in means(self._reported).items()
            }
            self._reported.clear()
            logs = logs | found
        super().log(logs, *args, **kwargs)

    def _capture(self, model: nn.Module, batch: dict[str, Any], count: int) -> CapturedStep:
        # Losses that add up to the step's: undo that the graph takes their mean.
        def scaled(loss: torch.Tensor, is_part: bool) -> torch.Tensor:
            if count > 1 and self._mesh is None:
                each(loss if is_part else loss / count)
            return loss * count if is_part and count > 1 else loss

        loss_fn = self._loss_fn(scaled)
        # The norm is logged where nothing is clipped too.
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else float("inf")
        options = {"accumulate": count, "passes": self._passes, "replay": self._mesh is None}
        return capture(model, loss_fn, batch, self.optimizer, max_grad_norm=limit, **options)

    def _loss_fn(self, scaled: Callable[[torch.Tensor, bool], torch.Tensor]) -> Callable:
        """``compute_loss`` as a function of the model and a batch; ``scaled(loss, is_part)`` is what it returns."""
        made = self._class  # such as BatchEncoding, made of a dict as Trainer's `_prepare_input` does

        def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            inputs = dict(batch)
            targets = inputs.pop(_TARGETS, None)  # a batch that a user verifies has none
            inputs = inputs if made is dict else made(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=targets)
            return scaled(loss, self._is_part_of_the_step(targets))

        return loss_fn

    def _is_part_of_the_step(self, targets: Any) -> bool:
        """Whether ``compute_loss`` gives a microbatch's share of the step's loss, as `Trainer.training_step` asks."""
        # Since transformers 5.20; before, Trainer does not ask, whatever a subclass says.
        said = self.loss_is_scaled_for_ga if hasattr(Trainer, "loss_is_scaled_for_ga") else None
        counted = self.model_accepts_loss_kwargs and targets is not None
        return counted or self.compute_loss_func is not None if said is None else said


GraphStep = GraphTrainer  # as a mix-in


def _is_replaced(owner: Any, name: str, base: type) -> bool:
    """Whether a subclass of ``base``, or the ``owner`` itself, has a method of its own."""
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def _gathered_for_metrics(gather: Callable, data: Any, *args: Any, **kwargs: Any) -> Any:
    """accelerate's ``gather_for_metrics`` of one process: a scalar stays, without a look at the data loader's epoch."""
    return data if isinstance(data, torch.Tensor) and data.ndim == 0 else gather(data, *args, **kwargs)


@contextlib.contextmanager
def _trl_in_a_graph() -> Iterator[None]:
    """Inside, TRL's heads score masked positions too, as they do where there is no Triton: on a GPU they would pick the
    others by a mask, and shapes would depend on values. Its losses are not timed: that reads the number of the step."""
    names = "trainer.utils", "extras.profiling", "trainer.grpo_trainer"
    utils, profiling, grpo = (sys.modules.get(f"trl.{name}") for name in names)
    with contextlib.ExitStack() as inside:
        if hasattr(utils, "_use_triton"):
            inside.enter_context(replaced(utils, _use_triton=_without_triton))
        if hasattr(profiling, "profiling_context"):
            inside.enter_context(replaced(profiling, profiling_context=_untimed))
        if hasattr(grpo, "GRPOTrainer"):
            inside.enter_context(replaced(grpo.GRPOTrainer, get_high_entropy_mask=_high_entropies))
        yield


def _high_entropies(trainer: Any, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """TRL's ``get_high_entropy_mask``, of one process, without a shape that depends on values."""
    if trainer.accelerator.num_processes > 1:
        raise ValueError("top_entropy_quantile below 1 compares the entropies of all ranks: set it to 1.0")
    kept = mask.bool()
    limit = entropies.float().where(kept, torch.nan).nanquantile(threshold)
    return (entropies * mask.float() >= limit) & kept


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


def _shown(microbatch: dict[str, Any]) -> str:
    """The form of a microbatch in words that ranks can compare."""

    def shown(leaf: Any) -> str:
        return f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(form(leaf))

    flat = {name: flatten_batch(value) for name, value in microbatch.items()}
    texts = [f"{name} {' '.join(map(shown, leaves))}" for name, (leaves, _) in flat.items()]
    nested = [f"{name} as {spec}" for name, (leaves, spec) in flat.items() if len(leaves) != 1]
    return " ".join(", ".join(texts + nested).split())


def _together(microbatches: list[dict[str, Any]]) -> dict[str, Any]:
    """Microbatches of one form one by one, along the first dimension of each tensor that has one."""
    if len(microbatches) == 1:
        return microbatches[0]
    flat, (_, spec) = [flatten_batch(batch)[0] for batch in microbatches], flatten_batch(microbatches[0])
    joined = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].ndim else parts[0]
        for parts in zip(*flat, strict=True)
    ]
    return rebuilt(microbatches[0], joined, spec)
