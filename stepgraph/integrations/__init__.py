"""Captured steps inside other libraries' training loops."""

from typing import TYPE_CHECKING, Any

from stepgraph.integrations.lengths import PadToLengths
from stepgraph.integrations.packing import PackToBudget, attend_within_documents

if TYPE_CHECKING:
    from stepgraph.integrations.trainer import GraphStep, GraphTrainer

__all__ = ["GraphStep", "GraphTrainer", "PackToBudget", "PadToLengths", "attend_within_documents"]


def __getattr__(name: str) -> Any:
    # transformers is imported when its Trainer is asked for.
    if name in ("GraphStep", "GraphTrainer"):
        from stepgraph.integrations import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
