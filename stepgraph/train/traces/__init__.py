"""A run's reports: the page of its graph, profiles of steps, a snapshot of its memory."""
