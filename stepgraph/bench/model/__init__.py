"""``stepgraph bench model``: unmodified models of ``transformers`` beside eager, torch.compile and Liger."""
