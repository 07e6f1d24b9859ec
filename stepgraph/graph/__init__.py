"""A training step as one FX graph: the graph itself, where nodes come from, facts about them, collectives."""
