"""The loss pass: cross entropy with its gradient."""
