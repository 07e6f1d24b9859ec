"""Inductor, with rules for its choices.

`fusion_guard` bounds the fusion of reductions by registers.
"""

from stepgraph.inductor.fusion_guard import fusion_guard

__all__ = ["fusion_guard"]
