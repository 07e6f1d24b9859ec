"""What enters and leaves the graphs of a program: one small frozen class per kind.

``kind`` and ``name`` are text for people, node names and pages, and nothing reads them back. ``part``: the number of a
local tensor where a wrapped one (such as a quantized weight) has several; None where it has one.
"""

from dataclasses import dataclass, field, fields
from typing import ClassVar


@dataclass(frozen=True)
class Named:
    """What all kinds have."""

    kind: ClassVar[str]

    @property
    def name(self) -> str:
        """Its name among the values of its kind."""
        first, part = getattr(self, fields(self)[0].name), getattr(self, "part", None)
        return (first.name if isinstance(first, Named) else str(first)) + ("" if part is None else f"#{part}")


@dataclass(frozen=True)
class ModelTensor(Named):
    """A tensor of the model."""

    path: str
    part: int | None = None

    @property
    def module(self) -> str:
        """The path of the module that owns it."""
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Parameter(ModelTensor):
    """A parameter of the model."""

    kind = "parameter"


@dataclass(frozen=True)
class Buffer(ModelTensor):
    """A buffer of the model."""

    kind = "buffer"


@dataclass(frozen=True)
class OptimizerState(Named):
    """The state ``key`` that the optimizer keeps of a parameter."""

    kind = "optimizer"
    parameter: str
    key: str
    part: int | None = None

    @property
    def name(self) -> str:
        return f"{self.parameter}.{self.key}" + ("" if self.part is None else f"#{self.part}")


@dataclass(frozen=True)
class GroupValue(Named):
    """The value ``key`` of the optimizer's parameter group number ``group``: its learning rate."""

    kind = "lr"
    group: int
    key: str = "lr"

    @property
    def name(self) -> str:
        return f"{self.key}.{self.group}"


@dataclass(frozen=True)
class HostValue(Named):
    """Number ``number`` of the scalars that the optimizer's own code computes on the host in every step."""

    kind = "host"
    number: int


@dataclass(frozen=True)
class BatchLeaf(Named):
    """Leaf number ``leaf`` of the flattened batch, or a microbatch's share of it."""

    kind = "batch"
    leaf: int
    part: int | None = None

    @property
    def name(self) -> str:
        return f"batch.{super().name}"


@dataclass(frozen=True)
class Accumulator(Named):
    """The sum of a parameter's gradients over microbatches, which calls of a step add to and nothing reads after it.
    ``whole``: (stage, number) of a sum of whole gradients, which the reduction to this rank's shard reads."""

    kind = "accumulator"
    parameter: str
    whole: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.parameter if self.whole is None else f"{self.parameter}:{self.whole[0]}.{self.whole[1]}"


@dataclass(frozen=True)
class Before(Named):
    """What a parameter or buffer that forward writes was before the step."""

    kind = "before"
    of: Parameter | Buffer


@dataclass(frozen=True)
class Ratio(Named):
    """The ratio of a condition that the update depends on (see `stepgraph.capture.guard`): that of a call; as an input,
    the highest that calls of the step gave."""

    kind = "ratio"
    condition: str


@dataclass(frozen=True)
class Value(Named):
    """What a call gives to other calls for the same microbatch, or for all of them, by the ``node`` that makes it.
    ``stage``: the stage of a pipeline that keeps it; None where it goes to another stage. ``arriving``: it is being
    received, and whatever reads it waits for it."""

    kind = "value"
    node: str
    stage: int | None = None
    arriving: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        return self.node if self.stage is None else f"{self.stage}.{self.node}"


@dataclass(frozen=True)
class Loss(Named):
    """The loss of a call. As an input, the sum of the losses so far, initially zero."""

    kind, name = "loss", "loss"


@dataclass(frozen=True)
class TotalLoss(Named):
    """The loss of the whole step, instead of the sum."""

    kind, name = "total", "loss"


@dataclass(frozen=True)
class Metric(Named):
    """A metric of the step."""

    kind = "metric"
    metric: str


@dataclass(frozen=True)
class Reported(Named):
    """What the loss of a call reported by `stepgraph.metric`; the step's metric is the mean over its calls."""

    kind = "reported"
    metric: str


@dataclass(frozen=True)
class Read(Named):
    """What Python in the loss reads of a call's values, after it."""

    kind = "read"
    key: str


@dataclass(frozen=True)
class Gradient(Named):
    """The gradient of a parameter, which no update in the graph takes."""

    kind = "grad"
    parameter: str


@dataclass(frozen=True)
class MadeState(Named):
    """Tensor ``number`` of the state that the optimizer makes in this step."""

    kind = "made"
    number: int


Input = (
    Parameter
    | Buffer
    | OptimizerState
    | GroupValue
    | HostValue
    | BatchLeaf
    | Accumulator
    | Before
    | Ratio
    | Value
    | Loss
)
Output = Loss | TotalLoss | Metric | Reported | Read | Gradient | MadeState | Value | Ratio
