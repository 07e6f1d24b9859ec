"""``stepgraph plan``: the forecast of a step on a cluster that is not there."""
