"""Checkpoints: written aside, renamed whole, read on any mesh."""
