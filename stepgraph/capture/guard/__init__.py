"""Conditions under which a step's update is left out, and the nodes that leave it out."""
