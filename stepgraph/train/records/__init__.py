"""A run's records: metrics, summary, progress line."""
