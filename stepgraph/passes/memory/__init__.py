"""Passes that trade memory for time."""
