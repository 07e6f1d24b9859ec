"""The order of passes, their contract, the options of a step, the runner, and one file per pass."""

from stepgraph.options import StepOptions
from stepgraph.passes.compile.cuda_graph import record_whole
from stepgraph.passes.contract import PASSES, Pass, PassReport, Target, get, register
from stepgraph.passes.memory.policy import parse_policy
from stepgraph.passes.order import chosen, configured, default, exact
from stepgraph.passes.runner import (
    Passes,
    asked_for,
    dry_run,
    for_labels,
    format_report,
    prepare,
    resolve,
    run_passes,
    split_at_pipeline_cut,
)
