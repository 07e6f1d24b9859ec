"""stepgraph captures a whole training step as one FX graph, rewrites it with explicit passes, and runs it.

step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0)
for batch in data:
    loss = step(batch)
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.capture import MasterAdamW
    from stepgraph.capture.python.end_of_step import end_of_step
    from stepgraph.capture.python.metrics import metric
    from stepgraph.errors import CaptureError
    from stepgraph.graph.step_graph import StepGraph
    from stepgraph.inspect.forecast.any_model import StepForecast, forecast
    from stepgraph.options import StepOptions
    from stepgraph.regions import region
    from stepgraph.step import CapturedStep, capture
    from stepgraph.verify import VerifyReport

__version__ = "0.2.0"
__all__ = [
    "CaptureError",
    "CapturedStep",
    "MasterAdamW",
    "StepForecast",
    "StepGraph",
    "StepOptions",
    "VerifyReport",
    "capture",
    "end_of_step",
    "forecast",
    "metric",
    "region",
]

#: Where each public name is. It is imported when it is first asked for: `stepgraph --help` does not wait for torch.
_HOMES = {
    "CaptureError": "stepgraph.errors",
    "CapturedStep": "stepgraph.step",
    "MasterAdamW": "stepgraph.capture",
    "StepForecast": "stepgraph.inspect.forecast.any_model",
    "StepGraph": "stepgraph.graph.step_graph",
    "StepOptions": "stepgraph.options",
    "VerifyReport": "stepgraph.verify",
    "capture": "stepgraph.step",
    "end_of_step": "stepgraph.capture.python.end_of_step",
    "forecast": "stepgraph.inspect.forecast.any_model",
    "metric": "stepgraph.capture.python.metrics",
    "region": "stepgraph.regions",
}


class _Package(ModuleType):
    """This module. `capture`, the function, shares its name with the room that it comes from: importing the room must
    not put the room in its place. `stepgraph.capture(...)` calls, `from stepgraph.capture import ...` imports."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "capture" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
