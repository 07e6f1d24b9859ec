"""Inductor, with rules for its choices.

`fusion_guard` bounds the fusion of reductions by registers; `tuned_reductions` gives norms better tiles.
"""

from stepgraph.inductor.fusion_guard import fusion_guard
from stepgraph.inductor.reduction_tuning import tuned_reductions

__all__ = ["fusion_guard", "tuned_reductions"]
