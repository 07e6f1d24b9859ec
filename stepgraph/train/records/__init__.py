"""What a run writes down: metrics, summary, plot."""
