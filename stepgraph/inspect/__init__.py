"""Reports on a captured step, and the forecast for a cluster you do not have."""
