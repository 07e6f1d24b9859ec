"""What we ask of Inductor: rules for its choices, and regions compiled apart.

`fusion_guard` bounds the fusion of reductions by registers; `tuned_reductions` gives norms better tiles. A `Region`
compiles by itself, with its own options.
"""

from stepgraph.inductor.choices.scope import fusion_guard, tuned_reductions
from stepgraph.inductor.regional import Region, region_of, tag

__all__ = ["Region", "fusion_guard", "region_of", "tag", "tuned_reductions"]
