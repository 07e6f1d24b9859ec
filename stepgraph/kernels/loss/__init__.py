"""Cross entropy with its gradient, whole or over a vocabulary that ranks share."""
