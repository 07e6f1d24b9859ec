"""The optimizers that a graph can hold: `update` adds them to it."""

from stepgraph.capture.optimizer.rule import MasterAdamW
from stepgraph.capture.optimizer.update import Update
