"""Cuts the graph of a microbatch into stages, and a stage into the graphs that a schedule calls; joins two graphs."""

from stepgraph.graph.stages.assign import Cut, free_nodes
from stepgraph.graph.stages.extract import extract, new_input
from stepgraph.graph.stages.join import joined
from stepgraph.graph.stages.pieces import pieces_of
