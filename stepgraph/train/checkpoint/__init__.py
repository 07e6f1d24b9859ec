"""Checkpoints: written atomically, checked on loading, and readable on any mesh."""
