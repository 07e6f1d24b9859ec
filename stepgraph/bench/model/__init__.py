"""``stepgraph bench model``: unmodified models of ``transformers`` next to eager, torch.compile and Liger."""
