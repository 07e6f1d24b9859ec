"""Losses of language models: cross entropy with its gradient, over a whole vocabulary or one that is sharded over
ranks, and heads that compute log-probabilities, entropies and KL divergences of tokens in chunks."""

from stepgraph.kernels.loss.heads import token_kl, token_log_probs, token_log_probs_and_entropies
