"""The embedding pass: deterministic gradients of tables."""
