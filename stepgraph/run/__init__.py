"""What executes: a step program bound to live tensors, node by node, compiled, or as CUDA graphs."""

from stepgraph.run.bound import BoundStep
from stepgraph.run.interpreter import Interpreter
from stepgraph.run.program import Accumulators, ProgramRunner, runner_of
