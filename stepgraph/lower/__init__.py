"""Lowering: from a step's specification (`StepSpec`) to the program that runs. Only it traces and rewrites."""

from stepgraph.lower.lengths import Lengths
from stepgraph.lower.lowering import copied, learn_lengths, lower, rewrite, rewrite_graph, search_of_peak, trace
from stepgraph.lower.memory import peak_bytes_by_policy, programs_by_policy
from stepgraph.lower.spec import StepSpec
