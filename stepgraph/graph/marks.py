"""Marks that one pass leaves in a node's ``meta`` for another."""

#: The node stays out of Inductor, because eager's operators were chosen for it.
KEEP_EAGER = "stepgraph_eager"

#: Inductor shall compile the node although it belongs to the optimizer.
COMPILE = "stepgraph_compile"
