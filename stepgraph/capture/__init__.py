"""Training step -> `StepGraph`: the trace, the state's flattening, and the provenance of every node."""

from stepgraph.capture.graph import InputSpec, OutputSpec, StepGraph
from stepgraph.capture.optimizer import MasterAdamW
from stepgraph.capture.provenance import Provenance, phase_of, provenance, set_provenance
from stepgraph.capture.trace import Traced, flatten_batch, trace_step

__all__ = [
    "InputSpec",
    "MasterAdamW",
    "OutputSpec",
    "Provenance",
    "StepGraph",
    "Traced",
    "flatten_batch",
    "phase_of",
    "provenance",
    "set_provenance",
    "trace_step",
]
