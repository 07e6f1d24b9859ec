"""The FLOP formula against torch's own count of the matrix products that ran."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, flops_per_token

LLAMA = Llama3Config(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=50, max_seq_len=16)
GOLF = GolfConfig(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=50)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(Llama3, LLAMA), (Llama3, replace(LLAMA, tie_embeddings=True)), (Golf, GOLF)],
    ids=["llama3", "llama3-tied", "golf"],
)
def test_formula_is_what_torch_counts(model_class, config):
    model = model_class(config)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    # The plain-matmul attention computes the full scores, which is what the formula counts.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    # The one known difference: the formula's N includes norm weights, which multiply but are no matrix product.
    norms = sum(param.numel() for param in model.parameters() if param.ndim == 1)
    assert counter.get_total_flops() == tokens.numel() * (flops_per_token(config, 16) - 6 * norms)


def test_a_sequence_of_no_length_is_refused():
    with pytest.raises(ValueError, match=r"^seq_len=0 is not positive; use a value above 0$"):
        flops_per_token(LLAMA, 0)
