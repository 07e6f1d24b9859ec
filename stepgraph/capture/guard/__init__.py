"""Conditions under which a step skips its update, and the nodes that skip it."""
