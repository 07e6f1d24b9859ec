"""``stepgraph bench step``."""
