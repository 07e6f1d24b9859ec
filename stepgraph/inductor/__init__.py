"""Inductor: rules for what it fuses and how it tiles, and regions of a graph that are compiled separately.

`fusion_guard` bounds the fusion of reductions by the registers they need; `tuned_reductions` gives norms better tiles.
A `Region` is compiled separately, with its own options.
"""

from stepgraph.inductor.choices.scope import fusion_guard, tuned_reductions
from stepgraph.inductor.regional import Region, region_of, tag
