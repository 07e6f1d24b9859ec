"""The optimizers that a graph can hold: `update` adds them to it, by one file for each kind."""

from stepgraph.capture.optimizer.master import MasterAdamW
from stepgraph.capture.optimizer.update import Update

__all__ = ["MasterAdamW", "Update"]
