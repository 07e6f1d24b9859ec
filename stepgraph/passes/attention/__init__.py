"""Attention: masks that the graph itself determines."""
