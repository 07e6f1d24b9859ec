"""What a run records: metrics, summary, progress line."""
