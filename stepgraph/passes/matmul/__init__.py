"""Matrix products of linear layers."""
