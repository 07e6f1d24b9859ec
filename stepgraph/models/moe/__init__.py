"""Mixture of experts: router, grouped experts, the exchange of rows between them, balance of load."""
