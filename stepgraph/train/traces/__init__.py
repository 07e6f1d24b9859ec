"""What a run shows of itself: the page of its graph, profiles of steps, a snapshot of its memory."""
