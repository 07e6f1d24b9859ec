"""`Placement`: how a model is distributed over a mesh, as a value in a step's specification."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from stepgraph.parallel.fsdp import layouts
from stepgraph.parallel.layout import Layout
from stepgraph.parallel.pipeline.layout import Pipeline


@dataclass(frozen=True)
class Placement:
    """``layouts``: how each parameter is sharded, by name. ``pipeline``: the model's stages; None where each rank runs
    the whole model."""

    layouts: Mapping[str, Layout]
    pipeline: Pipeline | None = None


def placement_of(model: nn.Module) -> Placement | None:
    """The placement that `parallelize` gave ``model``, or the model that it is a copy of; None for a plain model.

    Raises ``ValueError`` for a module that holds a model in a pipeline, or for a part of one: stages are cut by the
    names of the model's parameters.
    """
    found = layouts(model)
    if not found:
        return None
    pipeline = next(iter(found.values())).pipeline
    if pipeline is not None and not pipeline.readers.keys() <= found.keys():
        raise ValueError(
            "the model holds one in a pipeline, or is a part of it, and stages are cut by the names of that one's "
            "parameters: use the model that was given to parallelize"
        )
    return Placement(found, pipeline)
