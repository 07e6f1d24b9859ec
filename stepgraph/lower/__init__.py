"""Lowering: from what a step is (`StepSpec`) to the program that runs. The only place that traces and rewrites."""

from stepgraph.lower.lengths import Lengths
from stepgraph.lower.lowering import copied, learn_lengths, lower, rewrite, rewrite_graph, search_of_peak, trace
from stepgraph.lower.memory import peak_bytes_by_policy, programs_by_policy
from stepgraph.lower.spec import StepSpec
