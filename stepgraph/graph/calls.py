"""The calls of a program's schedule."""

from enum import StrEnum, auto
from typing import NamedTuple


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
    PREFETCH = auto()  # copies of optimizer state to the device begin, before the update
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
        """What receives it there."""
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
