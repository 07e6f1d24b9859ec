"""Marks that one pass leaves in a node's ``meta`` for another."""

#: The node stays out of Inductor, because eager's operators were chosen for it.
KEEP_EAGER = "stepgraph_eager"

#: Inductor shall compile the node although it belongs to the optimizer.
COMPILE = "stepgraph_compile"

#: Of FlexAttention: how many pairs of a query and a key its mask leaves, in one head of one sequence.
VISIBLE_PAIRS = "stepgraph_visible_pairs"
