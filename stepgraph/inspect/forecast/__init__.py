"""``stepgraph plan``: the forecast of a step on a cluster you do not have."""
