"""`forecast`: memory and time of any model's training step on a GPU you do not have, from traces without values."""

import contextlib
import dataclasses
import math
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from stepgraph import compat
from stepgraph.capture import checks, flatten_batch
from stepgraph.capture.batch import batch_sizes, first_places, has_values, rebuilt
from stepgraph.capture.fake import fake_mode
from stepgraph.capture.inputs import fake
from stepgraph.capture.optimizer import Update
from stepgraph.capture.optimizer.update import Optimizers
from stepgraph.capture.state import Slot, model_slots, swapped
from stepgraph.capture.step_trace import LossFn
from stepgraph.costs import links
from stepgraph.costs.attention import transient_bytes
from stepgraph.costs.hardware import GPUS, Gpu
from stepgraph.costs.memory import HELD, Moment, at_peak, state_bytes
from stepgraph.costs.roofline import Fusion, products_seconds
from stepgraph.costs.step import StepCost, graph_cost, step_cost
from stepgraph.errors import first_line
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.host_copies import device_bytes
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import provenance
from stepgraph.graph.step_graph import name_of, type_of
from stepgraph.graph.values import Accumulator, Input, ModelTensor, OptimizerState
from stepgraph.inspect.forecast.tables import size_text, time_text
from stepgraph.lower import StepSpec, copied, programs_by_policy, rewrite, search_of_peak, trace
from stepgraph.lower.peak import PeakTry
from stepgraph.passes import StepOptions, Target
from stepgraph.passes.waiting import Waiting

#: Kinds of memory that do not grow with the batch.
_FIXED = ("parameters", "optimizer", "gradients")
#: Groups of tensors that the text shows.
_SHOWN = 10
#: Batches that are traced at most to find the largest one that fits.
_MOST_BATCHES = 6
#: Integers in the largest batch that is tried, unless the given one has half as many: theirs are real, 0.5 GiB of them.
_MOST_INTEGERS = 2**26


@dataclass(frozen=True)
class Held:
    """A group of similar tensors in memory at the peak: their ``count``, and total ``bytes``. ``type``: of each, as
    in ``bfloat16[8, 16]``. ``what``: the operator that makes them, or their name in the module that holds them.
    ``module``: its path, with ``*`` for the numbers of several blocks. ``source``: the ``file:line`` that makes them,
    ``""`` for parameters, optimizer state and the batch."""

    bytes: int
    count: int
    kind: str
    type: str
    what: str
    module: str
    source: str


@dataclass(frozen=True)
class PolicyForecast:
    """The step under one memory policy: bytes at the peak, seconds of a step, and whether it fits."""

    memory: str
    peak_bytes: int
    step_s: float
    fits: bool


@dataclass(frozen=True)
class StepForecast:
    """The forecast of a training step on one GPU. As text, one screen.

    ``memory_bytes``: of the GPU. ``peak_phase``, ``peak_module``, ``peak_source``: where the step needs ``peak_bytes``.
    ``by_kind``: bytes at the peak by kind (see `costs.memory.KINDS`); ``largest``: tensors at the peak, the
    largest first. ``step_s``: seconds of a step. ``products_share``: the share of the published FLOP/s that the model's
    products and attention reach, recomputation not counted, in [0, 1].

    ``largest_batch``: the largest batch that was traced and fits with these options, 0 where none does, None where it
    is not known; ``batch_note`` says how it was found, or why it is not known. ``policies``: the step under each memory
    policy, the one that recomputes least first.
    """

    gpu: str
    memory_bytes: int
    memory: str
    batch_size: int | None
    accumulate: int
    peak_bytes: int
    peak_phase: str
    peak_module: str
    peak_source: str
    by_kind: dict[str, int]
    largest: tuple[Held, ...]
    step_s: float
    products_share: float
    largest_batch: int | None
    batch_note: str
    policies: tuple[PolicyForecast, ...]

    @property
    def fits(self) -> bool:
        """Whether the peak is less than the GPU's memory."""
        return self.peak_bytes <= self.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; bytes and seconds."""
        return dataclasses.asdict(self) | {"fits": self.fits}

    def __str__(self) -> str:
        left = self.memory_bytes - self.peak_bytes
        verdict = f"fits, {size_text(left)} to spare" if left >= 0 else f"does not fit, {size_text(-left)} too much"
        batch = "a step" if self.batch_size is None else f"batch {self.batch_size}"
        parts = f" in {self.accumulate} microbatches" if self.accumulate > 1 else ""
        per_s = "" if self.batch_size is None else f", {self.batch_size / self.step_s:,.4g} samples/s"
        where = ", ".join(filter(None, [self.peak_module, os.path.basename(self.peak_source)]))
        lines = [
            f"{batch}{parts} on one {self.gpu}, memory policy {self.memory}",
            f"peak {size_text(self.peak_bytes)} of {size_text(self.memory_bytes)}: {verdict}",
            f"step {time_text(self.step_s)}{per_s}, products at {self.products_share:.1%} of the published FLOP/s",
            f"largest batch that fits: {'unknown' if self.largest_batch is None else self.largest_batch} "
            f"({self.batch_note})",
            "",
            f"at the peak, in {self.peak_phase}" + (f" ({where})" if where else ""),
            "  " + ", ".join(f"{kind} {size_text(size)}" for kind, size in self.by_kind.items() if size),
        ]
        rows = [
            (size_text(held.bytes), _times(held), held.kind, held.what.removeprefix("aten."))
            + (held.module or "model", os.path.basename(held.source))
            for held in self.largest[:_SHOWN]
        ]
        lines += _columns(rows, right=(0,))
        if rest := self.largest[_SHOWN:]:
            count, size = sum(held.count for held in rest), sum(held.bytes for held in rest)
            lines.append(f"  {size_text(size)} in {count:,} others")
        policies = [
            (each.memory, size_text(each.peak_bytes), time_text(each.step_s), "fits" if each.fits else "does not fit")
            for each in self.policies
        ]
        lines += ["", "memory policies", *_columns(policies, right=(1, 2))]
        lines += [
            "",
            "Not in the peak: what torch's allocator reserves beyond what is allocated, the CUDA context, and",
            "workspaces of kernels: leave some GiB free.",
        ]
        return "\n".join(lines)


def forecast(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizers | None = None,
    *,
    device: str = "h200",
    passes: Literal["exact", "default"] | StepOptions = "default",
    max_grad_norm: float | None = None,
    accumulate: int = 1,
) -> StepForecast:
    """Forecast the training step that `stepgraph.capture` would make of the same arguments, on a GPU that you need not
    have: peak memory and what fills it, step time, the largest batch, and what each memory policy would change.

    The step is traced a few times without values, for ``batch`` and for other batch sizes: nothing is computed, and no
    tensor of the model's, the gradients' or the optimizer's size is allocated. Neither model nor optimizer changes.

    Args:
        model: any ``nn.Module``, on a CPU, on a GPU, or on the meta device (where it takes no memory).
        loss_fn, batch, optimizer, max_grad_norm, accumulate: as in `stepgraph.capture`. Only the batch's form matters,
            and integers that Python reads. A batch size is the first dimension that all tensors of the batch share.
        device: ``"h100"``, ``"h200"`` or ``"b200"``.
        passes: ``"exact"``, ``"default"``, or a ``stepgraph.StepOptions``.

    Returns:
        A `StepForecast`: ``print`` it, or take its ``to_json()``.

    Raises:
        stepgraph.CaptureError: the step cannot be captured; the message names module path and source line.
        ValueError: an unknown device, passes that are a list, an optimizer that cannot be captured.
    """
    if device not in GPUS:
        raise ValueError(f"unknown device {device!r}: choose one of {', '.join(GPUS)}")
    if not isinstance(passes, StepOptions):
        if passes not in ("exact", "default"):
            raise ValueError(f"passes={passes!r}: a forecast takes 'exact', 'default' or a stepgraph.StepOptions")
        passes = StepOptions(passes)
    optimizer = compat.accelerated_inside(optimizer, accumulate)
    checks.check_arguments(model, loss_fn, batch, optimizer)
    leaves, _ = flatten_batch(batch)
    checks.check_microbatches(leaves, accumulate)
    gpu = GPUS[device]
    with Waiting(), _without_values(model, batch, optimizer) as (stand_in, given):
        spec = StepSpec(
            *(model, loss_fn, given, stand_in), max_grad_norm=max_grad_norm, accumulate=accumulate, passes=passes
        )
        return _forecast(spec, gpu)


def _forecast(spec: StepSpec, gpu: Gpu) -> StepForecast:
    target = Target.forecast(gpu)
    traced = trace(spec, target).program
    products_s = sum(n * products_seconds(step.graph, gpu) for step, n in traced.counted())
    found = dict(programs_by_policy(traced, spec, target))
    program = found.get(spec.passes.memory) or rewrite(copied(traced), spec, target)
    costs = {policy: _cost(made, spec, gpu) for policy, made in found.items()}
    cost = costs.get(spec.passes.memory) or _cost(program, spec, gpu)
    peak = _peak(cost)
    node, largest = _at_peak(program, spec)
    where = provenance(node)
    largest_batch, note = _largest_batch(spec, traced, cost, gpu)
    sizes = set(batch_sizes(flatten_batch(spec.batch)[0]))
    return StepForecast(
        gpu=gpu.name,
        memory_bytes=int(gpu.memory),
        memory=spec.passes.memory,
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        accumulate=spec.accumulate,
        peak_bytes=peak.total,
        peak_phase=peak.phase,
        peak_module=where.path if where else "",
        peak_source=where.source if where else "",
        by_kind=peak.bytes,
        largest=largest,
        step_s=cost.timeline.step_seconds,
        products_share=products_s / cost.timeline.step_seconds,
        largest_batch=largest_batch,
        batch_note=note,
        policies=tuple(
            PolicyForecast(policy, total := _peak(each).total, each.timeline.step_seconds, total <= gpu.memory)
            for policy, each in costs.items()
        ),
    )


def _cost(program: StepProgram, spec: StepSpec, gpu: Gpu) -> StepCost:
    return step_cost(
        [
            (graph_cost(step, gpu, links.groups_of(step.graph.nodes), fused=spec.passes.compiles_all), n)
            for step, n in program.counted()
        ]
    )


def _peak(cost: StepCost) -> Moment:
    return max(cost.moments, key=lambda moment: moment.total)


# What is in memory at the peak.


def _at_peak(program: StepProgram, spec: StepSpec) -> tuple[fx.Node, tuple[Held, ...]]:
    """(the node at the memory peak, the tensors held there, largest first)."""
    bound = [both for step in program.graphs.values() for both in step.bound()]
    lasting = ModelTensor | OptimizerState | Accumulator  # in memory during every call of a step
    state = {what: node for node, what in bound if isinstance(what, lasting)}
    found = []
    for step in program.graphs.values():
        aliases = Aliases(step.graph)
        node, held = at_peak(step, aliases, Fusion(step.graph, aliases, spec.passes.compiles_all))
        inputs = dict(step.bound())
        taken = set(inputs.values())
        entries = [_entry(one, kind, inputs.get(one)) for one, kind in held.items()]
        entries += [
            _entry(one, HELD.get(what.kind, "inputs"), what) for what, one in state.items() if what not in taken
        ]
        if workspace := transient_bytes(node):
            _, (*_, module, source), path = _entry(node, "temporary", None)
            key = ("temporary", "", f"results and workspace of {name_of(node.target)}", module, source)
            entries.append((workspace, key, path))
        found.append((sum(size for size, _, _ in entries), node, entries))
    _, node, entries = max(found, key=lambda each: each[0])
    return node, _grouped(entries)


#: What tensors of one group share, numbers in module paths aside: the fields of `Held` from `kind` on.
_Key = tuple[str, str, str, str, str]


def _entry(node: fx.Node, kind: str, what: Input | None) -> tuple[int, _Key, str]:
    """(bytes of ``node`` on the device, what its group shares, its module). ``what``: the input that it is."""
    found, source = provenance(node), ""
    if isinstance(what, ModelTensor):
        path, _, name = what.path.rpartition(".")
    elif isinstance(what, OptimizerState | Accumulator):
        path, _, name = what.parameter.rpartition(".")
        name += f" {what.key}" if isinstance(what, OptimizerState) else " gradient"
    elif what is not None:
        path, name = "", what.name
    else:
        maker = node.args[0] if name_of(node.target) == "getitem" else node
        path, name = found.path if found else "", name_of(maker.target)
        source = found.source if found else ""
    return device_bytes(node), (kind, type_of(node), name, re.sub(r"(?<![^.])\d+(?![^.])", "*", path), source), path


def _grouped(entries: Sequence[tuple[int, _Key, str]]) -> tuple[Held, ...]:
    """Similar tensors as one group, such as the tensors of a model's repeated blocks."""
    groups: dict[_Key, list[tuple[int, str]]] = defaultdict(list)
    for size, key, path in entries:
        if size:
            groups[key].append((size, path))
    made = []
    for (kind, type_, name, starred, source), members in groups.items():
        module = starred if len({path for _, path in members}) > 1 else members[0][1]
        made.append(Held(sum(size for size, _ in members), len(members), kind, type_, name, module, source))
    return tuple(sorted(made, key=lambda held: -held.bytes))


# The largest batch.


def _largest_batch(spec: StepSpec, traced: StepProgram, cost: StepCost, gpu: Gpu) -> tuple[int | None, str]:
    """(the largest batch whose step was traced and fits, or None; how it was found, or why it is not known). Under
    ``memory="peak=..."`` it is the largest that meets the peak, each rewritten for its lowest one.

    In each phase the fullest moment counts as linear in the batch between two that were traced. It is not quite: how
    many parts a head is computed in, for example, depends on the batch. So each batch that the lines say fits is
    traced, until the next one would be less than a hundredth larger.
    """
    sizes = set(batch_sizes(flatten_batch(spec.batch)[0]))
    if len(sizes) != 1:
        given = ", ".join(map(str, sorted(sizes))) or "none"
        return None, f"tensors of the batch do not share their first dimension: {given}"
    n, target = spec.accumulate, Target.forecast(gpu)
    rows = sizes.pop() // n
    if search := search_of_peak(traced, spec, target):
        if search.asked > gpu.memory:
            return None, f"a peak of {size_text(search.asked)} is asked for, and the GPU has {size_text(gpu.memory)}"
        first, memory, way = search.least(PeakTry()), float(search.asked), "met the peak"
        peaks: dict[int, Mapping[str, int]] = {0: {"": state_bytes(first.made)}, rows: {"": first.peak}}
        other = 2 * rows
        if (aim := _where_full(0, peaks[0], rows, peaks[rows], memory)) < math.inf:
            other = max(math.floor(0.995 * aim), other)
    else:
        memory, way, peaks = gpu.memory, "fits", {rows: _peak_by_phase(cost)}
        fits = _peak(cost).total <= memory
        if rows == 1 and not fits:
            return 0, f"a batch of {n} is the smallest, and does not fit"
        guess = _guess(cost, rows, memory)
        other = 2 * rows if fits else rows // 2
        if guess is not None and (guess > rows if fits else guess < rows):
            other = max(guess, 1)
    integers = sum(leaf.numel() for leaf in flatten_batch(spec.batch)[0] if _is_repeated(leaf))
    most = max(rows * _MOST_INTEGERS // (integers or 1), 2 * rows)
    like, low, note, other = None, rows, "", min(other, most)
    for _ in range(_MOST_BATCHES):
        try:
            program, resized = _at_batch(spec, other * n, target)
            if search is None:
                peaks[other] = _peak_by_phase(_cost(rewrite(program, resized, target), spec, gpu))
            else:  # one that is little larger has as many tiles and parts
                like = search_of_peak(program, resized, target).least(like if other < 1.2 * low else None)
                peaks[other] = {"": like.peak}
        except Exception as error:  # it is not the user's batch: a model may refuse it
            note = f"a batch of {other * n} cannot be traced: {first_line(error)}"
            break
        met = [size for size, found in peaks.items() if max(found.values()) <= memory]
        over = [size for size in peaks if size not in met]
        low, high = max(met, default=0), min(over, default=math.inf)
        one, then = (low, high) if met and over else sorted(met)[-2:] if met else sorted(over)[:2]
        below = min(high - 1, high * (1 - 0.005 * 2 ** (len(over) - 1))) if over else high  # lines err by rounding
        aim = min(_where_full(one, peaks[one], then, peaks[then], memory), below)
        if aim == math.inf and search:  # as where the larger one runs in more tiles
            aim = _where_full(0, peaks[0], then, peaks[then], memory)
        if aim == math.inf:
            return None, f"the peak does not grow between batches of {one * n} and {then * n}"
        other = min(max(math.floor(aim), math.isqrt(low * high) if over else low), most)
        if low == most:
            note = "larger ones are not tried"
        if other <= low or other < 1.01 * low:
            break
    if note and len(peaks) == 1:
        return None, note
    tried = ", ".join(str(size * n) for size in sorted(peaks) if size)
    return low * n, f"the largest that {way} of {tried}" + (note and f"; {note}")


def _where_full(a: int, low: Mapping[str, int], b: int, high: Mapping[str, int], memory: float) -> float:
    """The rows at which some phase fills ``memory``, on lines through what each needs with ``a`` and ``b`` rows."""
    most = math.inf
    for phase in low.keys() & high.keys():
        slope = (high[phase] - low[phase]) / (b - a)
        if slope > 0:
            most = min(most, a + (memory - low[phase]) / slope)
        elif low[phase] > memory:
            most = 0.0
    return most


def _at_batch(spec: StepSpec, size: int, target: Target) -> tuple[StepProgram, StepSpec]:
    """(the step for ``size`` samples as traced, its spec)."""
    resized = dataclasses.replace(spec, batch=_resized(spec.batch, size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first trace has warned
        return trace(resized, target).program, resized


def _guess(cost: StepCost, rows: int, memory: float) -> int | None:
    """The rows of a microbatch that would fill the memory if all but state grew with them; None if nothing does."""
    found = []
    for moment in cost.moments:
        fixed = sum(moment.bytes[kind] for kind in _FIXED)
        if moment.phase != "optimizer" and moment.total > fixed:
            found.append(rows * (memory - fixed) / (moment.total - fixed))
    return math.floor(min(found)) if found else None


def _peak_by_phase(cost: StepCost) -> Mapping[str, int]:
    peaks: dict[str, int] = defaultdict(int)
    for moment in cost.moments:
        peaks[moment.phase] = max(peaks[moment.phase], moment.total)
    return peaks


# The step without values.


@contextlib.contextmanager
def _without_values(
    model: nn.Module, batch: Any, optimizer: Optimizers | None
) -> Iterator[tuple[Optimizers | None, Any]]:
    """Inside, ``model`` holds fake tensors; (an optimizer of them, a fake batch). Tensors of a model that is whole on
    the meta device, and its batch, count as being on a CPU."""
    if optimizer is not None:
        Update(optimizer)  # refuses what cannot be captured, hooks included
    slots = model_slots(model)
    checks.check_layouts(slots)
    checks.check_modules(model)
    live = [slot.tensor for slot in slots]
    if any(map(compat.is_traceable_wrapper_subclass, live)):
        raise ValueError(
            "a forecast takes a model of plain tensors on one GPU, and this one's are sharded, quantized or wrapped; "
            "use the plain model, or forecast ranks with stepgraph plan"
        )
    home = next((t.device for t in live if not t.is_meta), torch.device("cpu"))
    mode = next((t.fake_mode for t in live if compat.is_fake(t)), None) or fake_mode()
    stand_ins = [_stand_in(mode, slot, home) for slot in slots]
    by_id = {id(slot.tensor): made for slot, made in zip(slots, stand_ins, strict=True)}
    on_cpu = home.type == "cpu"
    with swapped(model, slots, stand_ins), _cuda_autocast_on_cpu() if on_cpu else contextlib.nullcontext():
        yield _with_parameters(optimizer, by_id), _fake_batch(mode, batch, home)


def _stand_in(mode: compat.FakeTensorMode, slot: Slot, home: torch.device) -> torch.Tensor:
    made = fake(mode, slot.tensor.detach(), home)
    return nn.Parameter(made, requires_grad=slot.tensor.requires_grad) if slot.is_parameter else made


def _with_parameters(optimizer: Optimizers | None, stand_ins: Mapping[int, torch.Tensor]) -> Optimizers | None:
    """``optimizer`` as before its first step, its parameters replaced by ``stand_ins`` (by id)."""
    if optimizer is None or isinstance(optimizer, list | tuple):
        return optimizer and [_with_parameters(one, stand_ins) for one in optimizer]
    made = object.__new__(type(optimizer))
    groups = [g | {"params": [stand_ins.get(id(p), p) for p in g["params"]]} for g in optimizer.param_groups]
    vars(made).update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
    return made


def _fake_batch(mode: compat.FakeTensorMode, batch: Any, home: torch.device) -> Any:
    leaves, structure = flatten_batch(batch)
    made = list(leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and not _has_counts(leaf):
            made[i] = fake(mode, leaf.detach(), home).requires_grad_(leaf.requires_grad)
    return rebuilt(batch, [made[i] for i in first_places(leaves)], structure)


def _has_counts(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds integers that Python may read, such as the lengths of labels."""
    return has_values(tensor) and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _is_repeated(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and _has_counts(leaf)


def _resized(batch: Any, rows: int) -> Any:
    """``batch`` with ``rows`` in the first dimension of its tensors; integers are repeated."""
    leaves, structure = flatten_batch(batch)
    made = [
        leaf[torch.arange(rows, device=leaf.device) % len(leaf)]
        if _is_repeated(leaf)
        else leaf.new_empty((rows, *leaf.shape[1:])).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor) and leaf.ndim
        else leaf
        for leaf in leaves
    ]
    return rebuilt(batch, [made[i] for i in first_places(leaves)], structure)


def _cuda_autocast_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Inside, ``torch.autocast("cuda")`` of a loss acts on the CPU, where the traced tensors are."""
    init = torch.autocast.__init__

    def on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return compat.replaced(torch.autocast, __init__=on_cpu)


# Text.


def _times(held: Held) -> str:
    """The number of tensors and their type, with short names of dtypes."""
    kind = held.type.replace("bfloat16", "bf16").replace("float32", "fp32").replace("float16", "fp16")
    return f"{held.count} x {kind}" if held.count > 1 else kind


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """``rows`` as aligned lines; the columns ``right`` are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def aligned(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in cells).rstrip()

    return [f"  {aligned(row)}" for row in rows]
