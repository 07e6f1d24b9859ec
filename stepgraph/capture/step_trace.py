"""One attempt to trace a training step: `make_fx` over fake tensors of forward, loss, backward, clip and update."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture import checks, gradients
from stepgraph.capture import guard as conditions
from stepgraph.capture.batch import (
    classes_of,
    first_places,
    flatten_batch,
    has_values,
    leaves_by_name,
    microbatch,
    rebuilt,
)
from stepgraph.capture.batch_reads import BatchReads
from stepgraph.capture.explain import explained
from stepgraph.capture.fake import OpenSizes, fake_mode
from stepgraph.capture.gradients import Share
from stepgraph.capture.guard import Guard, Kept, check_repeatable, written_names
from stepgraph.capture.inputs import Inputs, add_optimizer
from stepgraph.capture.known import KnownValues
from stepgraph.capture.launches import recorded_launches
from stepgraph.capture.made_once import Made, made_once
from stepgraph.capture.optimizer import Update
from stepgraph.capture.optimizer.update import Optimizers
from stepgraph.capture.python import writes
from stepgraph.capture.python.end_of_step import traced_end_of_step, write_assigned
from stepgraph.capture.python.host_draws import Draws, DrawsFound, Hosted, Recording
from stepgraph.capture.python.metrics import collected
from stepgraph.capture.python.reads import Change, Reads
from stepgraph.capture.python.replay import Replay, ReplayError
from stepgraph.capture.python.torch_random import refusing_seeds
from stepgraph.capture.python.values import is_under_torch
from stepgraph.capture.recorder import Recorder, RunAgain, calls_to_repeat
from stepgraph.capture.roles import record_roles
from stepgraph.capture.state import (
    OutsideError,
    Slot,
    TrainsError,
    Whole,
    Wrapping,
    kept_tensors,
    model_slots,
    put_back,
    repeated_blocks,
    swapped,
    unwrap,
    wrap,
)
from stepgraph.capture.tidy import compute_values_alone, keep_workspaces, name_inputs, name_numbers, reshape_by_views
from stepgraph.errors import CaptureError
from stepgraph.graph import values
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph

LossFn = Callable[[nn.Module, Any], torch.Tensor]


class StepTrace:
    """One capture: what its graphs have in common."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        optimizer: Optimizers | None,
        max_grad_norm: float | None,
        accumulate: int,
        guard: Guard,
        share: Share | None = None,
        exact: bool = False,
        ones: Sequence[int] = (),
        shapes: Mapping[str, Sequence[int]] | None = None,
        room: float = math.inf,
        open_sizes: OpenSizes | None = None,
        replayed: tuple[float, frozenset[str]] | None = None,
        repeated: Collection[int] | None = None,
        hosted: Sequence[Hosted] | None = (),
        outside: Mapping[str, nn.Module] | None = None,
    ):
        # Not where Python runs again after the step, or where several ranks would draw for one batch.
        self.hosted = hosted if replayed is None and share is None else None
        self.draws = Draws()
        self.guard, self.exact = guard, exact
        self.model, self.loss_fn, self.max_grad_norm, self.accumulate = model, loss_fn, max_grad_norm, accumulate
        self.share = share
        self.reached = Whole(model, outside) if outside else model
        self.slots = model_slots(self.reached)
        self.batch, (leaves, self.spec) = batch, flatten_batch(batch)
        self.ones = ones  # literals, whose values Python may read as in eager
        self.first = first_places(leaves)  # what is one tensor in the batch is one in the trace
        self.leaves = [microbatch(leaf, 0, accumulate) for leaf in leaves]
        self.needs_grad = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        self.tensor_leaves = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.trained = [i for i, slot in enumerate(self.slots) if slot.tensor.requires_grad]
        sizes = {id(slot.tensor): shapes[slot.name] for slot in self.slots if slot.name in (shapes or {})}
        self.update = Update(optimizer, sizes, room) if optimizer is not None else None
        checks.check_layouts(self.slots)
        checks.check_owned(self.update)
        checks.check_no_parameters(leaves, self.slots)
        self.stateless = self.update.without_state() if self.update else []
        self.repeated = repeated
        self.recorder = Recorder(self.reached, repeated or (), accumulate * exact)
        live = [t for slot in self.slots for t in unwrap(slot.tensor)[0]]
        self.home = next((t.device for t in live if not t.is_meta), torch.device("cpu"))
        self.mode = _mode_of([*live, *(t for i in self.tensor_leaves for t in unwrap(self.leaves[i])[0])], open_sizes)
        self.open_sizes = open_sizes
        self.landing: list[tuple[Slot, Wrapping | None]] = []
        others = {f"{cls.__qualname__} of the batch": cls for cls in classes_of(batch)}
        self.reads = Reads(self.reached, loss_fn, others | (self.update.code() if self.update else {}))
        self.reads.types.of_packages = open_sizes is not None
        self.replay = None if replayed is None else Replay(model, loss_fn, self.slots, self.mode, *replayed)
        self.changes: list[Change] = []
        self.made: list[Made] = []
        self.batch_reads = BatchReads({})
        self.kept = ""  # where modules keep tensors of the step

    def outside_with(self, found: OutsideError) -> dict[str, nn.Module]:
        """The module outside of the model whose state is changed as ``found`` says, by its path; raises without one."""
        held = self.reads.module_with(found.of) if self.share is None else None
        if held is None:
            raise found
        return dict([held])

    def buffer_of(self, found: TrainsError) -> torch.Tensor:
        """The buffer that ``found`` says forward makes require a gradient; raise if it is a parameter."""
        slot = next(slot for slot in self.slots if slot.name == found.name)
        if slot.is_parameter:
            raise found
        return slot.tensor

    def prove_replay(self) -> list[Change]:
        """What rehearsals of the loss function change, see `Replay.prove`."""
        try:
            return self.replay.prove(self.model) if self.replay else []
        except Exception as error:
            if not self.kept or isinstance(error, ReplayError):
                raise
            raise ReplayError(
                f"the loss reads values in Python and tensors that forward keeps in {self.kept}; pass these as results"
            ) from error

    def program(self) -> StepProgram:
        """The graphs of the step and their schedule."""
        if (param := checks.foreign(self.update, self.slots)) is not None:
            self.update = None
            if self.share is None:
                self.whole()  # raises OutsideError if a module outside of the model has it, such as a criterion
            checks.refuse_foreign(param)
        if self.update:
            with self._of_optimizers():
                self.update.prepare({id(slot.tensor): slot for slot in self.slots}, self.mode, self.home)
        return self.whole() if self.accumulate == 1 else self.accumulation()

    def drop_state(self) -> None:
        """Forget the optimizer state that this trace created."""
        if self.update:
            self.update.drop_state(self.stateless)

    def whole(self) -> StepProgram:
        """One graph of forward, loss, backward and update."""
        inputs = Inputs(self.mode, self.home)
        entries = inputs.add_slots(self.slots)
        groups = add_optimizer(self.update, self.slots, inputs, entries) if self.update else []
        kept = Kept(entries, inputs)
        batch = self._batch_inputs(inputs)
        outputs: list[values.Output] = []

        def traced(*flat: torch.Tensor) -> list[torch.Tensor]:
            tensors = self._tensors(flat, entries)
            loss, grads, held = self._forward_backward(flat, tensors, batch, inputs)
            with self._in_optimizer():
                write_assigned(self.recorder, held, flat)
                outputs.extend((values.Loss(), *self._of_loss()))
                ratios = self.guard.ratios(self.conditions.combined(), loss)
                finished = self._finish(flat, tensors, grads, groups, ratios, kept, outputs, inputs)
                return [loss, *self._of_loss().values(), *finished]

        with self._dropping_state():
            return StepProgram.plain(self._graph(traced, inputs, outputs))

    def accumulation(self) -> StepProgram:
        """The graph of one microbatch, which adds its gradients to accumulators, and the graph of the update."""
        inputs = Inputs(self.mode, self.home)
        entries = inputs.add_slots(self.slots)
        sums = {i: inputs.add_accumulator(self.slots[i].name, inputs.fakes[entries[i][0]][0]) for i in self.trained}
        batch = self._batch_inputs(inputs)
        reached: list[int] = []
        outputs: list[values.Output] = [values.Loss()]

        def traced(*flat: torch.Tensor) -> list[torch.Tensor]:
            loss, grads, held = self._forward_backward(flat, self._tensors(flat, entries), batch, inputs)
            with self.recorder.watch_graph(), torch.no_grad():
                with self.recorder.in_phase("backward"):
                    for i, grad in grads.items():
                        self.recorder.attribute(self.slots[i].path)
                        flat[sums[i]].add_(grad)
                with self.recorder.in_phase("optimizer"):
                    write_assigned(self.recorder, held, flat)
                    # In a pipeline, each stage joins its own.
                    stated = self.conditions.each() if self.share else self.conditions.combined().items()
                    ratios = [*stated, *self.guard.ratios({}, loss).items()]
            reached.extend(grads)
            outputs.extend((*self._of_loss(), *(values.Ratio(name) for name, _ in ratios)))
            return [loss, *self._of_loss().values(), *(ratio for _, ratio in ratios)]

        with self._dropping_state():
            micro = self._graph(traced, inputs, outputs)
            gradients.add_early(micro)
            return StepProgram.accumulation(micro, self._update_graph(micro, reached), self.accumulate)

    def _update_graph(self, micro: StepGraph, reached: Sequence[int]) -> StepGraph:
        """Clipping and the optimizer's update from accumulated gradients; without an optimizer, the gradients.

        ``micro``: the graph of a microbatch, which may write to the model. ``reached``: the slots with gradients.
        """
        share = self.share
        stages = share and share.all_stages(self.slots, reached)
        reached = [i for i in reached if share is None or share.holds(self.slots[i].name)]
        written = written_names(micro)
        inputs = Inputs(self.mode, self.home)
        entries = inputs.add_slots(self.slots)
        groups = add_optimizer(self.update, self.slots, inputs, entries) if self.update else []
        sums = {i: inputs.add_accumulator(self.slots[i].name, inputs.fakes[entries[i][0]][0]) for i in reached}
        kept = Kept(entries, inputs, [i for i, slot in enumerate(self.slots) if slot.name in written])
        named = dict.fromkeys(what.condition for what in micro.outputs if isinstance(what, values.Ratio))
        stated = {name: inputs.add_ratio(name) for name in named}
        outputs: list[values.Output] = []

        def traced(*flat: torch.Tensor) -> list[torch.Tensor]:
            grads = {i: flat[place] for i, place in sums.items()}
            ratios = {name: flat[place] for name, place in stated.items()}
            with self._in_optimizer():
                if share:
                    grads = {i: share.whole(self.slots[i].name, grad) for i, grad in grads.items()}
                tensors = self._tensors(flat, entries)
                return self._finish(flat, tensors, grads, groups, ratios, kept, outputs, inputs, stages)

        return self._graph(traced, inputs, outputs)

    def _batch_inputs(self, inputs: Inputs) -> dict[int, tuple[slice, Wrapping | None]]:
        first = [i for i in self.tensor_leaves if self.first[i] == i]
        made = {i: inputs.add(partial(values.BatchLeaf, i), self.leaves[i]) for i in first}
        for i in self.open_sizes.shapes if self.open_sizes else ():
            place = made[i][0].start
            inputs.fakes[place] = self.open_sizes.fake(i, inputs.fakes[place])
        return made

    def _batch(self, flat: Sequence[torch.Tensor], inputs: dict[int, tuple]) -> Any:
        leaves = list(self.leaves)
        for i, (where, wrapping) in inputs.items():
            leaf = wrap(flat[where], wrapping).requires_grad_(self.needs_grad[i])
            if has_values(self.leaves[i]):
                compat.represent(leaf, self.leaves[i])
            leaves[i] = torch.ones(leaf.shape, dtype=leaf.dtype, device=leaf.device) if i in self.ones else leaf
        return rebuilt(self.batch, leaves, self.spec)

    def _knowing(
        self, flat: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], inputs: dict[int, tuple]
    ) -> KnownValues:
        """The values that Python may read. Ranks have different batches and must run the same graph, or each waits for
        another: over a mesh, no value of the batch; in a pipeline, only literals."""
        meshed = any(compat.is_traceable_wrapper_subclass(slot.tensor) for slot in self.slots)
        places = {
            compat.node_of_trace(flat[where.start]): i
            for i, (where, _) in inputs.items()
            if self.share is None and not meshed and has_values(self.leaves[i]) and not self.leaves[i].requires_grad
        }
        self.settings = {
            compat.node_of_trace(tensor): slot
            for slot, tensor in zip(self.slots, tensors, strict=True)
            if self.share is None and not slot.tensor.requires_grad and checks.is_setting(slot.tensor)
        }
        buffers = {node: slot.tensor for node, slot in self.settings.items()}
        self.batch_reads = BatchReads(places, buffers, self.open_sizes is not None)
        leaves = {node: self.leaves[i] for node, i in places.items()}
        own = set(checks.storages([slot.tensor for slot in self.slots]))
        enters = lambda tensor: self.share is None and checks.storages([tensor])[0] not in own  # noqa: E731
        found = KnownValues(leaves, buffers, self.batch_reads, self.exact, enters)
        self.recorder.is_known, self.recorder.is_literal = found.knows_of_batch, found.knows
        return found

    def _tensors(self, flat: Sequence[torch.Tensor], entries: Sequence[tuple[slice, Wrapping | None]]) -> list:
        tensors = []
        for slot, (where, wrapping) in zip(self.slots, entries, strict=True):
            tensors.append(wrap(flat[where], wrapping).requires_grad_(slot.tensor.requires_grad))
            compat.represent(tensors[-1], slot.tensor)
            if slot.is_parameter:
                vars(tensors[-1])["_is_param"] = True  # isinstance(tensor, nn.Parameter)
        return tensors

    def _forward_backward(
        self, flat: Sequence[torch.Tensor], tensors: list[torch.Tensor], batch: dict[int, tuple], inputs: Inputs
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], list]:
        """(loss, gradients by slot, what each place of the model holds after forward: see `write_assigned`)."""
        kept_before, modules_before = {one.id for one in kept_tensors(self.reached)}, dict(self.reached.named_modules())
        places, whole = checks.storages(tensors), flatten_batch(self.batch)[0]
        with (
            self.recorder.watch_graph(),
            swapped(self.reached, self.slots, tensors),
            self.recorder.watch_modules(),
            self.reads.noted(),
            torch.enable_grad(),
            self._knowing(flat, tensors, batch) as self._known,
            recorded_launches(self._known.note_writes),
            compat.transformers_sees_values(
                partial(self._known.hides_alike, leaves=whole, microbatches=self.accumulate)
                if self.exact
                else self._known.knows
            ),
            compat.checks_of_known_values(self._known.knows),
            compat.lists_of_fake_tensors(self._known.listed),
            checks.refusing_scalers(self.recorder),
            checks.refusing_facts(self.recorder, self.slots, tensors, flat, (where for where, _ in batch.values())),
            checks.refusing_settings(self.recorder),
            checks.refusing_conversions(self.recorder),
            refusing_seeds(self.recorder),
            self.reads.generators.refused(self.recorder),
            conditions.collected() as self.conditions,
        ):
            params = [(self.slots[i].path, tensors[i]) for i in self.trained]
            frozen = {id(t): s.name for s, t in zip(self.slots, tensors, strict=True) if not s.tensor.requires_grad}
            with self.reads.types.as_eager():
                given = self._batch(flat, batch)
                before = leaves_by_name(given)
                loss, grads = self._loss_and_grads(given, tensors, params, frozen, inputs)
                checks.refuse_batch_keys(before, leaves_by_name(given), self.exact)
            put_back(self.reached, self.slots)
            held = [(s, t, holder[key]) for s, t in zip(self.slots, tensors, strict=True) for holder, key in s.places]
            checks.refuse_replaced(modules_before, self.reached)
            checks.refuse_data_assigned(self.slots, tensors, places)
            checks.refuse_attributes_set(self.slots, tensors, self.exact)
            checks.refuse_batch_in_buffers(held, [t for where, _ in batch.values() for t in flat[where]], self.exact)
            replaced = {slot.name for slot, tensor, new in held if new is not tensor}
            for node, slot in self.settings.items():
                moves = slot.name in replaced or self._known.is_written(node)
                checks.refuse_moving(slot, moves and self.batch_reads.reads(node))
            known = {*kept_before, *(id(new) for _, _, new in held)}
            if self.open_sizes is None:
                still = [(s, t) for s, t in zip(self.slots, tensors, strict=True) if not s.tensor.requires_grad]
                state = {compat.node_of_trace(t): s.tensor for s, t in still if s.name not in replaced}
                self.made = made_once(self.reached.modules(), state, known)
            self._known.settle(self.reached)
            self.kept = checks.kept_of_step(self.reached, known)
            self.reads.read += self._known.outside
            self.changes = self.reads.changes()
            writes.refuse_kept(self.changes)
        return loss, {i: g for i, g in zip(self.trained, grads, strict=True) if g is not None}, held

    def _of_loss(self) -> dict[values.Output, torch.Tensor]:
        """What the loss function reported, and what Python read in it."""
        read = self.replay.wanted if self.replay else {}
        return {values.Reported(name): t for name, t in self.reported.items()} | {
            values.Read(str(key)): t for key, t in read.items()
        }

    def _reading(self, tensors: Sequence[torch.Tensor], batch: Any) -> contextlib.AbstractContextManager[Callable]:
        """Inside, Python reads outside of modules are recorded; pass the loss to the yielded function."""
        if self.replay is None:
            return contextlib.nullcontext(lambda _: None)
        names = {id(t): slot.name for slot, t in zip(self.slots, tensors, strict=True)}
        return self.replay.traced(names, batch, self._known.knows, self._known.knows_of_batch)

    def _check_repeats(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `RunAgain` if forward has calls of ``torch.utils.checkpoint`` that must run twice."""
        if self.repeated is None and self.recorder.checkpoints:
            places = [(t, *place) for s, t in zip(self.slots, tensors, strict=True) for place in s.places]
            # No node writes a buffer that forward replaces: any call may read the new one in its second run.
            replaced = any(holder[key] is not tensor for tensor, holder, key in places)
            calls = range(self.recorder.checkpoints) if replaced else calls_to_repeat(compat.graph_of_trace())
            if calls := self.recorder.in_contexts.union(calls):
                raise RunAgain(calls)

    def _loss_and_grads(
        self,
        batch: Any,
        tensors: Sequence[torch.Tensor],
        params: Sequence[tuple[str, torch.Tensor]],
        frozen: Mapping[int, str],
        inputs: Inputs,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Loss and gradients as ``(loss_fn(model, batch) / accumulate).backward()`` gives them.

        Gradients of DTensors come as their local tensors. ``params``: (module path, tensor). A parameter that the loss
        does not reach has the gradient None. ``frozen``: see `Recorder.watch_backward`.
        """
        call = partial(self.loss_fn, self.model, batch)
        with collected() as self.reported, self._reading(tensors, batch) as end:
            loss = self._recording(call, inputs)
            end(loss)
        checks.check_loss(loss)
        checks.refuse_metrics_of_stages(map(str, self._of_loss()), self.share is not None)
        self._check_repeats(tensors)
        checks.refuse_own_backward(params)
        if self.accumulate > 1:
            loss = loss / self.accumulate
        seed = torch.ones_like(loss)
        trained = [p for _, p in params]
        watch = partial(self.recorder.watch_backward, params=trained, frozen=frozen)
        watch([loss.grad_fn])
        with (
            self.recorder.in_phase("backward"),
            torch.no_grad(),
            compat.watched_backward(watch),
            gradients.received(trained) as received,
        ):
            try:
                grads = list(torch.autograd.grad(loss, trained, seed, allow_unused=True))
            except RuntimeError as error:
                # What eager saves inside a checkpointed call, it makes again in backward, whatever was written since.
                calls = range(self.recorder.checkpoints)
                if len(self.repeated or ()) < len(calls) and "modified by an inplace" in str(error):
                    raise RunAgain(calls) from error
                raise
            checks.refuse_draws(self.reads.random, "backward")
            for i, (path, param) in enumerate(params):
                self.recorder.attribute(path, param)
                if param.grad is not None:
                    checks.refuse_parts(received[i], path, self.recorder.exact)
                    grads[i] = reduce(torch.add, received[i])
                if grads[i] is not None:
                    checks.refuse_sparse(grads[i], path)
                    grad = gradients.local(grads[i], param)
                    grads[i] = compat.as_accumulated(grad, unwrap(param)[0][0]) if self.accumulate == 1 else grad
        return loss.detach(), grads

    def _recording(self, call: Callable[[], Any], inputs: Inputs) -> Any:
        """What ``call`` gives; what it draws on the host and makes tensors of is recorded."""
        if self.hosted is None:
            return checks.without_host_random(self.recorder, call, self.reads.random)

        def add_leaf(value: torch.Tensor, device: torch.device) -> torch.Tensor:
            return inputs.add_drawn(value, device, len(self.leaves) + len(recording.draws.leaves) - 1)[0]

        # In a checkpointed call eager draws again in backward, and gets other numbers.
        refuses = lambda: self.recorder.in_checkpoint  # noqa: E731
        recording = Recording(self.hosted, self.reads.random, self._known, add_leaf, refuses)
        self.draws = recording.draws
        try:
            with recording.recorded():
                return call()
        except Exception as error:
            if isinstance(error, DrawsFound) or not (recording.draws.calls or recording.failed):
                raise
            raise DrawsFound(None) from error

    @contextlib.contextmanager
    def _of_optimizers(self) -> Iterator[None]:
        """Inside, the ``step()`` of optimizers runs: Python must do nothing in it that each step would do again."""
        if not self.update.own:
            yield
            return
        for optimizer in self.update.own:
            for name, value in vars(optimizer).items():
                self.reads.random.add(f"{type(optimizer).__name__}.{name}", getattr(value, "__self__", value))
        with refusing_seeds(self.recorder), checks.refusing_settings(self.recorder):
            yield
        checks.refuse_draws(self.reads.random, "the optimizer's step")

    @contextlib.contextmanager
    def _in_optimizer(self) -> Iterator[None]:
        with self.recorder.watch_graph(), self.recorder.in_phase("optimizer"), torch.no_grad():
            yield

    def _finish(
        self,
        flat: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        grads: dict[int, torch.Tensor],
        groups: list[dict[str, Any]],
        ratios: dict[str, torch.Tensor],
        kept: Kept,
        outputs: list[values.Output],
        inputs: Inputs,
        stages: gradients.AllStages | None = None,
    ) -> list[torch.Tensor]:
        """Clip, update unless a ratio is above 1, and return metrics, ratios and the gradients that no update took.
        ``outputs`` grows with them."""
        results, norm = [], None
        if self.max_grad_norm is not None:
            with compat.Repeating():  # on a CPU, some operators for each parameter
                others = [p for _, p in self.update.owned()] if self.update else []
                own = {id(p) for p in (*self.model.parameters(), *others)}
                mine = {i: grad for i, grad in grads.items() if id(self.slots[i].tensor) in own}
                clipped, norm = gradients.clip(mine, tensors, self.max_grad_norm, stages)
                grads |= clipped
            results.append(norm)
            outputs.append(values.Metric("grad_norm"))
        skip, ratios = self.guard.skip(ratios, norm, self.slots, stages and stages.group)
        written = kept.written() if skip.flag is not None else []
        attribute = self.recorder.attribute
        self.updated = set()
        if self.update:
            given = inputs.add_host, self.mode
            with self.reads.noted() if self.update.own else contextlib.nullcontext(), self._of_optimizers():
                self.updated = self.update.record(groups, grads, flat, attribute, skip, *given)
                writes.refuse_by_optimizer(self.reads.changes() if self.update.own else [])
            checks.refuse_buffers_as_numbers((t for host in self.update.hosts for t in host.outside), self.slots)
            with self.reads.noted():
                metrics, changed = traced_end_of_step(self.recorder, self.model, self.slots, tensors, flat)
            results.extend(metrics.values())
            outputs.extend(map(values.Metric, metrics))
            written = sorted({*written, *changed}) if skip.flag is not None else []
        kept.restore(flat, written, skip)
        if self.guard.skip_nonfinite:
            results.append(skip.flag)
            outputs.append(values.Metric("skipped"))
        growing = [name for name in ratios if name in self.conditions.grow]
        results += [ratios[name] for name in growing]
        outputs.extend(map(values.Ratio, growing))
        landed = {i: grad for i, grad in grads.items() if i not in self.updated}
        self.updated = {id(self.slots[i].tensor) for i in self.updated}
        self.landing.extend((self.slots[i], kept.entries[i][1]) for i in landed)
        outputs.extend(values.Gradient(self.slots[i].name) for i in landed)
        created = self.update.created if self.update else []
        outputs.extend(values.MadeState(number) for number in range(len(created)))
        return results + gradients.unshared([*landed.values(), *created], taken=flat)

    @contextlib.contextmanager
    def _dropping_state(self) -> Iterator[None]:
        """Eager gives no optimizer state to parameters that the loss does not reach."""
        self.updated: set[int] = set()
        try:
            yield
        finally:
            if self.update:
                self.update.drop_state(p for p in self.stateless if id(p) not in self.updated)

    def _graph(self, traced: Callable, inputs: Inputs, outputs: list[values.Output]) -> StepGraph:
        """The graph of ``traced``, a function of ``inputs``."""
        start = time.perf_counter()
        with (
            torch.no_grad(),
            self.mode,
            compat.trace_context(self.mode),
            compat.dispatch_flex_attention(),
            compat.inline_compiled(),
            compat.open_sizes(is_under_torch) if self.open_sizes else contextlib.nullcontext(),
            explained(self.recorder),
        ):
            module = compat.trace(traced, inputs.fakes)
        mesh = next((slot.tensor.device_mesh for slot in self.slots if hasattr(slot.tensor, "device_mesh")), None)
        step = StepGraph(module, inputs.specs, outputs, repeated_blocks(self.model), mesh)
        checks.refuse_fake_constants(step)
        checks.refuse_layouts(step)
        checks.refuse_hidden_writes(step, flatten_batch(self.batch)[0])
        reshape_by_views(step)
        keep_workspaces(step)
        compute_values_alone(step)
        name_numbers(step)
        name_inputs(step)
        record_roles(step, self.recorder.reducing, [slot.tensor for slot in self.slots])
        if self.conditions.grow:
            check_repeatable(step)
        step.module.recompile()  # inputs may have been dropped
        step.capture_s = time.perf_counter() - start
        return step


def _mode_of(live: Sequence[torch.Tensor], open_sizes: OpenSizes | None = None) -> compat.FakeTensorMode:
    modes = {t.fake_mode for t in live if isinstance(t, compat.FakeTensor)}
    if open_sizes is not None:
        modes.add(open_sizes.mode)
    if len(modes) > 1:
        raise CaptureError("the model's fake tensors belong to several fake modes; build it under one")
    return modes.pop() if modes else fake_mode()
