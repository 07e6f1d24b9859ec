"""The order of passes, their contract, the options of a step, the runner, and one file per pass."""

from stepgraph.passes.compile.cuda_graph import record_whole
from stepgraph.passes.contract import PASSES, Pass, PassReport, get, register
from stepgraph.passes.memory.recompute import parse_policy
from stepgraph.passes.options import StepOptions
from stepgraph.passes.order import chosen, configured, default, exact
from stepgraph.passes.policies import peak_bytes_by_policy
from stepgraph.passes.runner import (
    Passes,
    around_cut,
    asked_for,
    format_report,
    prepare,
    rehearsed,
    resolve,
    run_passes,
)
from stepgraph.passes.target import Target
