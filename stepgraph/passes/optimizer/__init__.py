"""Passes over clipping and the optimizer's update."""
