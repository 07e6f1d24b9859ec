"""Which configuration a kernel runs with."""
