"""The pipeline, the contract of a pass, the runner, and one file per pass."""

from stepgraph.passes.contract import PASSES, Pass, PassReport, get
from stepgraph.passes.memory.recompute import parse_policy
from stepgraph.passes.order import configured, default, exact
from stepgraph.passes.policies import peak_bytes_by_policy
from stepgraph.passes.runner import format_report, prepare, run_passes

__all__ = [
    "PASSES",
    "Pass",
    "PassReport",
    "configured",
    "default",
    "exact",
    "format_report",
    "get",
    "parse_policy",
    "peak_bytes_by_policy",
    "prepare",
    "run_passes",
]
