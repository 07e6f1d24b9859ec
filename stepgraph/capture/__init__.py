"""Training step -> `StepGraph`: the trace, the state's flattening, and the provenance of every node."""

from stepgraph.capture.batch import flatten_batch
from stepgraph.capture.optimizer import MasterAdamW
from stepgraph.capture.trace import Traced, trace_step
from stepgraph.graph.provenance import Provenance, phase_of, provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec, StepGraph
