"""`StepGraph`: one training step as one flat FX graph, with the names of everything that enters and leaves it."""

import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.report import PassReport
from stepgraph.graph.values import Input, Output, Value


class Kind(StrEnum):
    """What a call does."""

    STEP = auto()  # a plain step
    MICROBATCH = auto()  # forward and backward, which adds gradients to accumulators
    FORWARD = auto()
    BACKWARD = auto()
    BACKWARD_INPUT = auto()  # the half of backward that the stage before waits for
    BACKWARD_WEIGHT = auto()  # the other half: gradients of parameters
    GATHER = auto()  # parameters, once for all microbatches
    REDUCE = auto()  # gradients, once for all microbatches
    SEND_FORWARD = auto()  # to the next stage
    SEND_BACKWARD = auto()  # to the stage before
    RECEIVE_FORWARD = auto()  # from the stage before
    RECEIVE_BACKWARD = auto()  # from the next stage
    SHARE_LOSS = auto()  # the last stage's loss, to all stages
    UPDATE = auto()

    @property
    def sends(self) -> bool:
        """Whether it sends a message to another stage."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def receives(self) -> bool:
        """Whether it receives a message of another stage."""
        return self in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)

    @property
    def forward(self) -> bool:
        """Whether it is part of forward, its messages included."""
        return self in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)

    @property
    def send(self) -> "Kind":
        """What sends the result of this computation to the stage that waits for it."""
        return Kind.SEND_FORWARD if self.forward else Kind.SEND_BACKWARD

    @property
    def receive(self) -> "Kind":
        """The call that receives it there."""
        return Kind.RECEIVE_FORWARD if self.forward else Kind.RECEIVE_BACKWARD

    @property
    def backward(self) -> bool:
        """Whether it computes a stage's backward, or a half of it."""
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Call(NamedTuple):
    """One call of the schedule: what it does, for which stage of a pipeline, and the microbatch that it is for (None:
    for all of them, or it reads none)."""

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None

    @property
    def graph(self) -> str:
        """The name of the graph that it runs."""
        return graph_name(self.kind, self.stage)

    @property
    def computes(self) -> bool:
        """Whether it computes for a stage of a pipeline: it sends and receives nothing."""
        return self.stage is not None and not self.kind.sends and not self.kind.receives

    def __str__(self) -> str:
        return self.graph if self.microbatch is None else f"{self.graph} of microbatch {self.microbatch}"


def graph_name(kind: Kind, stage: int | None = None) -> str:
    """The name of the graph that calls of ``kind`` for ``stage`` run."""
    return str(kind) if stage is None else f"{kind}.{stage}"


@dataclass(frozen=True)
class InputSpec:
    """One placeholder: ``what`` it is, and the live local ``tensor`` that it is bound to; None where a call passes it
    (`BatchLeaf`, `Value`, `Loss`) or a runner allocates it (`Accumulator`, `Before`, `Ratio`)."""

    what: Input
    tensor: torch.Tensor | None = field(default=None, repr=False, compare=False)


@dataclass
class StepGraph:
    """A captured training step.

    ``module``: flat graph; its placeholders are ``inputs`` in order (wrapped tensors such as DTensors appear as
    their local tensors), its outputs ``outputs`` in order. The graph writes new parameters, buffers and optimizer
    state into its own placeholders. ``blocks``: module paths of the model's repeated blocks. ``mesh``: the device
    mesh of its DTensors, if any. ``axes``: the mesh's axis of each name that nodes give a process group.
    ``capture_s``: seconds the capture took. ``log``: reports of the passes applied.
    ``executable``: what runs, called with the inputs; terminal passes replace it and leave ``module`` readable.
    ``recording``: set where the step shall run as CUDA graphs: the report of the pass that asked for it, which a runner
    completes. See `stepgraph.run`. ``in_flight``: how many microbatches' values forward keeps for backward at one time.
    ``on_host``: names of nodes that no CUDA graph can hold then, and why. ``stage``: its number in a pipeline.
    ``once``: graphs that a step calls once for all of its microbatches, next to its calls of this one: ``GATHER``
    before them, whose values they read, and ``REDUCE`` after them.
    """

    module: fx.GraphModule
    inputs: list[InputSpec]
    outputs: list[Output]
    blocks: list[str] = field(default_factory=list)
    mesh: DeviceMesh | None = None
    axes: dict[str, str] = field(default_factory=dict)
    capture_s: float = 0.0
    log: list[PassReport] = field(default_factory=list)
    executable: Callable[..., Any] = None
    recording: PassReport | None = None
    on_host: dict[str, str] = field(default_factory=dict)
    in_flight: int = 1
    stage: int | None = None
    once: dict[Kind, "StepGraph"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.executable = self.executable or self.module

    @property
    def graph(self) -> fx.Graph:
        """The FX graph itself."""
        return self.module.graph

    @property
    def keeps_values(self) -> bool:
        """Whether it gives values to other calls of the step, or reads theirs."""
        return any(isinstance(what, Value) for what in (*(spec.what for spec in self.inputs), *self.outputs))

    def bound(self) -> Iterator[tuple[fx.Node, Input]]:
        """Each placeholder and what it is, in order."""
        nodes = self.graph.find_nodes(op="placeholder")
        return zip(nodes, [spec.what for spec in self.inputs], strict=True)

    def returned(self) -> Iterator[tuple[fx.Node, Output]]:
        """Each node that the graph returns and what it is, in order."""
        return zip(self.graph.output_node().args[0], list(self.outputs), strict=True)

    def calling(self, *targets: Callable) -> list[fx.Node]:
        """The nodes that call ``targets``, those of the first in order, then those of the next."""
        return [n for target in targets for n in self.graph.find_nodes(op="call_function", target=target)]

    def placeholders(self, *kinds: type[Input]) -> list[fx.Node]:
        """Placeholders of the given kinds (all of them if none is given), in order."""
        return [node for node, what in self.bound() if not kinds or isinstance(what, kinds)]

    def nodes(self, *phases: str) -> Iterator[fx.Node]:
        """Operator nodes of the given phases (all of them if none is given), in order."""
        nodes = (node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr", "output"))
        return (node for node in nodes if phase_of(node) in phases) if phases else nodes

    @property
    def node_count(self) -> int:
        """How many `nodes` there are."""
        graph, others = self.graph, ("placeholder", "get_attr", "output")
        return len(graph.nodes) - sum(len(graph.find_nodes(op=op, sort=False)) for op in others)

    def count_by_phase(self) -> dict[str, int]:
        """Number of operator nodes in each phase."""
        return dict(Counter(phase_of(node) for node in self.nodes()))

    def block_of(self, node: fx.Node) -> str | None:
        """The repeated block that ``node`` belongs to, by its module path."""
        found = provenance(node)
        return None if found is None else self.block_at(found.path)

    def block_at(self, path: str) -> str | None:
        """The repeated block that the module ``path`` is or belongs to."""
        return next((block for block in self.blocks if path == block or path.startswith(block + ".")), None)

    def text(self) -> str:
        """The graph as readable text: one line per node with shape, dtype, phase, module path, source line, role and
        region."""
        lines = []
        for node in self.graph.nodes:
            if node.op == "output":
                names = [f"{what.kind}:{what.name}" for what in self.outputs]
                lines.append(f"return {', '.join(map(str, node.args[0]))}  # {', '.join(names)}")
                continue
            lines.append(line_of(node, node.target, node.args, node.kwargs))
        return "\n".join(lines) + "\n"


def line_of(node: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """``node`` in the text of a graph; ``target``, ``args``, ``kwargs``: its call, current or earlier."""
    call = {"placeholder": "input", "get_attr": f"constant {name_of(target)}"}.get(node.op)
    if call is None:
        given = [*map(_short, args), *(f"{key}={_short(value)}" for key, value in kwargs.items())]
        call = f"{name_of(target)}({', '.join(given)})"
    found = provenance(node)
    where = ""
    if found:
        file, _, line = found.source.rpartition(":")
        where = f"  # {found.phase} {found.path or 'model'} {os.path.basename(file)}:{line}".rstrip(":")
        if found.checkpoint is not None:
            where += f" checkpoint {found.checkpoint}"
        where += f" ({found.role})" if found.role else ""
        where += f" [{found.region}]" if found.region else ""
    return f"{node.name}: {type_of(node)} = {call}{where}"


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 12:
        return f"[{_short(value[0])}, ... {len(value)} in all]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def name_of(target: Any) -> str:
    """What a node calls, as texts name it: ``aten.mm``, ``getitem``."""
    return "getitem" if target is operator.getitem else str(target).removesuffix(".default")


def type_of(node: fx.Node) -> str:
    """Dtype and shape of ``node``'s result, as ``float32[8, 16]``."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} values"
    return "?" if value is None else type(value).__name__
