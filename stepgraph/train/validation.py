"""The validation loss of a run: eager, or through the stages of a pipeline."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph.capture import flatten_batch
from stepgraph.capture.python.metrics import collected
from stepgraph.capture.step_trace import LossFn
from stepgraph.config.train import TrainConfig
from stepgraph.kernels.comm.exchange import Session
from stepgraph.lower import StepSpec, lower
from stepgraph.parallel import placement_of
from stepgraph.parallel.ranks import Ranks
from stepgraph.run.memory import Memory
from stepgraph.run.program import ProgramRunner
from stepgraph.run.results import Results

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ValidationSet:
    """Fixed batches, their ``name`` in the metrics, and the ``share`` of their loss in that of all sets."""

    name: str
    share: float
    batches: Sequence[Batch]


class Validation:
    """The losses of ``model`` on fixed ``sets`` of batches, in evaluation mode and without gradients."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, sets: Sequence[ValidationSet], device: torch.device):
        self.model, self.loss_fn, self.sets, self.device = model, loss_fn, sets, device
        placement = placement_of(model)
        self._staged = placement is not None and placement.pipeline is not None
        self._pipelined: PipelinedLoss | None = None

    @property
    def batches(self) -> Sequence[Batch]:
        """The batches of the first set."""
        return self.sets[0].batches

    @torch.no_grad()
    def losses(self, check: Callable[[float, Batch], None]) -> dict[str, float]:
        """The mean loss of each set by ``val_loss_NAME``, and that of all by ``val_loss``, each set with its share; and
        the means of scalars that the loss reports by `stepgraph.metric`, by ``val_NAME``.

        ``check`` is called with each batch's loss and the batch. All ranks of a pipeline ask together.
        """
        self.model.eval()
        means: dict[str, float] = {}
        others: Counter[str] = Counter()
        for one in self.sets:
            losses = []
            for batch in one.batches:
                with collected() as found:
                    losses.append(self._loss({k: v.to(self.device) for k, v in batch.items()}).item())
                check(losses[-1], batch)
                for name, value in found.items():
                    if value.ndim == 0:
                        others[f"val_{name}"] += value.item() * one.share / len(one.batches)
            means[f"val_loss_{one.name}"] = statistics.fmean(losses)
        self.model.train()
        if len(self.sets) == 1:
            return {"val_loss": next(iter(means.values())), **others}
        return {"val_loss": sum(m * s.share for m, s in zip(means.values(), self.sets, strict=True))} | means | others

    def _loss(self, batch: Batch) -> torch.Tensor:
        if not self._staged:
            return self.loss_fn(self.model, batch)
        if self._pipelined is None:
            self._pipelined = PipelinedLoss(self.model, self.loss_fn, batch)
        return self._pipelined(batch)


class PipelinedLoss:
    """``loss = pipelined(batch)`` of a model whose stages are on several ranks, all of which call it.

    The model is captured as it is now (``eval()`` or not); its parameters are read where they lie. Batches have the
    form of ``batch``. Where a rank's experts need larger buffers, all capture it again. Raises as `stepgraph.capture`.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, batch: Any):
        # Its operators as captured: no pass has run on it.
        self._spec = StepSpec(model, loss_fn, None, placement=placement_of(model), passes=(), backward=False)
        self._capture(batch)

    def _capture(self, batch: Any) -> None:
        lowered = lower(replace(self._spec, batch=batch))
        self._grow = lowered.grow
        self._run = ProgramRunner(lowered.program, Session(), Memory())

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss on ``batch``, a scalar, on every rank."""
        results = self._run(flatten_batch(batch)[0])
        while exceeded := self._exceeded(results):
            for name, ratio in exceeded.items():
                self._grow[name](ratio)
            self._capture(batch)
            results = self._run(flatten_batch(batch)[0])
        return results.loss

    def _exceeded(self, results: Results) -> dict[str, float]:
        """The conditions that any rank exceeded and their ratios, the same on all ranks."""
        if not self._grow:
            return {}
        nothing = torch.zeros((), dtype=torch.float64, device=results.loss.device)
        ratios = torch.stack([results.ratios.get(name, nothing) for name in self._grow])
        dist.all_reduce(ratios, dist.ReduceOp.MAX)
        return {name: ratio for name, ratio in zip(self._grow, ratios.tolist(), strict=True) if ratio > 1}


class NotExactError(RuntimeError):
    """A step of exact passes is not bitwise equal to eager."""


def verify_step(
    step: stepgraph.CapturedStep,
    batches: Sequence[dict[str, torch.Tensor]],
    config: TrainConfig,
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Verify ``step`` on microbatches of ``batches``, and print what it says.

    Raises `NotExactError` if the passes are exact and any rank's result is not eager's, though eager repeats itself.
    """
    parts = list(itertools.islice(itertools.cycle(batches), config.accumulate))
    # The usual number of targets of conversations is the same in all.
    joined = lambda found: (torch.cat(found) if found[0].ndim else found[0]).to(device)  # noqa: E731
    batch = {name: joined([part[name] for part in parts]) for name in parts[0]}
    report = step.verify(batch)
    reports = Ranks().gather(lambda: report)
    rank, worst = max(enumerate(reports), key=lambda one: (not one[1].bitwise, not one[1].close))
    say(str(worst) + (f" (rank {rank})" if len(reports) > 1 and not worst.bitwise else ""))
    if config.passes == "exact" and not worst.bitwise and worst.repeats:
        raise NotExactError(
            f"the exact step is not bitwise equal to eager: {worst.largest.kind} {worst.largest}; "
            "train without --verify, and report it with the lines above"
        )
    if not all(r.close for r in reports):
        say(
            f"warning: loss or gradient norm differ from eager by more than a relative {worst.tolerance:.1g}, the most "
            "that rounding in the step's dtypes explains; compare with --passes exact"
        )
