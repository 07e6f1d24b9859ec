"""Rules for what Inductor fuses and how it tiles reductions."""
