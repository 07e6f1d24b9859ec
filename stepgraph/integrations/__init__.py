"""Captured steps inside other people's training loops."""

from typing import Any

from stepgraph.integrations.lengths import PadToLengths, choose_lengths
from stepgraph.integrations.packing import PackToBudget, attend_within_documents


def __getattr__(name: str) -> Any:
    # transformers is asked for when its Trainer is.
    if name == "GraphTrainer":
        from stepgraph.integrations.trainer import GraphTrainer

        return GraphTrainer
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; it has GraphTrainer, PackToBudget, PadToLengths, "
        "attend_within_documents and choose_lengths"
    )
