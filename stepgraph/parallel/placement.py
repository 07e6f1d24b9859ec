"""`Placement`: how a model lies on the ranks of a mesh, as a value.

`parallelize` makes one and notes it here, by the model; `stepgraph.capture` looks it up once and puts it into the
step's specification. Nothing is written on the model.
"""

import weakref
from dataclasses import dataclass

from torch import nn

from stepgraph.parallel.fsdp import layouts
from stepgraph.parallel.mesh import Mesh
from stepgraph.parallel.pipeline.layout import Pipeline


@dataclass(frozen=True)
class Placement:
    """``mesh``: the ranks that share the model. ``pipeline``: its stages; None where each rank runs the whole model."""

    mesh: Mesh
    pipeline: Pipeline | None = None


_placements: weakref.WeakKeyDictionary[nn.Module, Placement] = weakref.WeakKeyDictionary()


def place(model: nn.Module, placement: Placement) -> None:
    """Note that ``model`` was made parallel as ``placement`` says."""
    _placements[model] = placement


def placement_of(model: nn.Module) -> Placement | None:
    """The placement that `parallelize` gave ``model``; None for a plain model.

    Raises ``ValueError`` for a part or a copy of a model in a pipeline: its parameters lie on several ranks, and the
    stages are those of the model that `parallelize` was given.
    """
    found = _placements.get(model)
    if found is None and any(isinstance(own.mesh, Mesh) and own.mesh.spec.pp > 1 for own in layouts(model).values()):
        raise ValueError(
            "the model is a copy or a part of one in a pipeline, whose stages are known of that one alone: give the "
            "model that was given to parallelize"
        )
    return found
