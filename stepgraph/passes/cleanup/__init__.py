"""Passes that tidy a graph: constants, views, casts, dead code."""
