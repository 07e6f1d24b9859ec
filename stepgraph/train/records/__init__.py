"""What a run records: metrics, summary, loss curve, progress line."""
