"""What ends a run early: signals, lost and hung ranks, out of memory."""
