"""Reports on a captured step, and the forecast for a cluster that is not there."""
