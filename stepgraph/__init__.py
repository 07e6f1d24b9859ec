"""stepgraph captures a whole training step as one FX graph, rewrites it with explicit passes, and runs it.

step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0)
for batch in data:
    loss = step(batch)
"""

# The function `capture` shares its name with the room it comes from. The room is imported first and the function
# bound after it: `stepgraph.capture(...)` calls, `from stepgraph.capture import ...` imports.
from stepgraph.capture import MasterAdamW
from stepgraph.capture.python.end_of_step import end_of_step
from stepgraph.errors import CaptureError
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes import StepOptions
from stepgraph.regions import region
from stepgraph.step import CapturedStep, capture
from stepgraph.verify import VerifyReport

__version__ = "0.1.0"
__all__ = [
    "CaptureError",
    "CapturedStep",
    "MasterAdamW",
    "StepGraph",
    "StepOptions",
    "VerifyReport",
    "capture",
    "end_of_step",
    "region",
]
