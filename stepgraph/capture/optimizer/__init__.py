"""The optimizers that a graph can hold: `update` puts them there, one file for each kind says how."""

from stepgraph.capture.optimizer.master import MasterAdamW
from stepgraph.capture.optimizer.update import Update

__all__ = ["MasterAdamW", "Update"]
