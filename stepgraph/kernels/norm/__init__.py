"""Norms: formula, reference, operators, public functions and modules."""
