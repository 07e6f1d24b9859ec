"""Inductor: rules for what it fuses and how it tiles, and pieces of a graph that are compiled separately.

`fusion_guard` bounds the fusion of reductions by the registers they need; `tuned_reductions` gives norms better tiles.
"""

from stepgraph.inductor.choices.scope import fusion_guard, tuned_reductions
