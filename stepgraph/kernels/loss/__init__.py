"""Cross entropy and its gradient, over a whole vocabulary or one that is sharded over ranks."""
