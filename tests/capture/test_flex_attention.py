"""FlexAttention is captured as its higher-order operators, forward and backward, and right against SDPA."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import stepgraph
from stepgraph.graph.provenance import provenance
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from tests.models.flex_llama import flex_llama

CONFIG = Llama3Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=61, max_seq_len=200)


@pytest.mark.parametrize(("length", "passes"), [(128, []), (200, "exact")])
def test_llama_trains_as_with_sdpa(length, passes):
    flex, sdpa = flex_llama(CONFIG, length), Llama3(CONFIG)
    sdpa.load_state_dict(flex.state_dict())
    ids = torch.randint(61, (3, 2, length))
    batches = [{"tokens": i, "targets": i.roll(-1, 1)} for i in ids]
    steps = [stepgraph.capture(model, next_token_loss, batches[0], passes=passes) for model in (flex, sdpa)]
    for batch in batches:
        losses = [step(batch) for step in steps]
        torch.testing.assert_close(*losses)
    for a, b in zip(flex.parameters(), sdpa.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_operators_and_their_provenance():
    ids = torch.randint(61, (2, 128))
    step = stepgraph.capture(flex_llama(CONFIG, 128), next_token_loss, {"tokens": ids, "targets": ids}, passes=[])
    found = [(str(n.target), *provenance(n)[:2]) for n in step.graph.nodes() if "flex" in str(n.target)]
    assert found == [
        ("flex_attention", "layers.0.attn", "forward"),
        ("flex_attention", "layers.1.attn", "forward"),
        ("flex_attention_backward", "layers.1.attn", "backward"),
        ("flex_attention_backward", "layers.0.attn", "backward"),
    ]
    assert not list(step.graph.nodes("unattributed"))
    assert "flex_attention_backward(" in step.graph.text()


class Biased(nn.Module):
    """Attention whose score modification reads a learned bias."""

    def __init__(self):
        super().__init__()
        self.qkv, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(33))

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        bias = self.bias
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[i - j + 16])


def test_score_modification_that_reads_a_tensor_is_refused():
    """Only Dynamo makes such a tensor an input of the operator."""
    model, x = nn.Sequential(Biased()), torch.randn(2, 17, 16)
    with pytest.raises(stepgraph.CaptureError, match=r"^0 \(.*test_flex_attention.py:\d+\) reads a tensor of the step"):
        stepgraph.capture(model, lambda m, x: m(x).square().mean(), x)
