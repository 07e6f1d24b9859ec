"""Attention within documents equals the attention of each document by itself, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from stepgraph.kernels.attention.documents import attend_documents, document_attention

LENGTHS = (5, 1, 7, 3)
H, D = 4, 8


def inputs(shared, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(LENGTHS), H, D), (sum(LENGTHS), H // shared, D), (sum(LENGTHS), H // shared, D)]
    found = [torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for size in sizes]
    ends = torch.tensor([0, *LENGTHS, 0, 0]).cumsum(0).to(torch.int32)  # two documents without tokens at the end
    return found, ends


def alone(q, k, v, causal, window, scale):
    """Each document by itself, with torch's attention and a mask of its own."""
    parts = []
    for q_, k_, v_ in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        n = len(q_)
        ahead = torch.arange(n) - torch.arange(n).unsqueeze(1)
        seen = torch.ones(n, n, dtype=torch.bool)
        if causal:
            seen = (ahead <= 0) & (ahead > -(window or n))
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q_, k_, v_)]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(mixed.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("causal, window", [(True, None), (True, 3), (False, None)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_document_by_itself(shared, causal, window, scale):
    (q, k, v), offsets = inputs(shared)
    grad = torch.randn(sum(LENGTHS), H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = attend_documents(q, k, v, offsets, 8, causal=causal, window=window, scale=scale)
    expected = alone(q, k, v, causal, window, scale)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for got, wanted in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_operator_keeps_its_promises():
    (q, k, v), offsets = inputs(2)
    torch.library.opcheck(document_attention, (q, k, v, offsets, 8, True, -1, None))


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda q, k, v, o: (q.unsqueeze(0), k, v, o), "flatten batch"),
        (lambda q, k, v, o: (q, k[:, :1].repeat(1, 3, 1), v[:, :1].repeat(1, 3, 1), o), "H_kv divides H"),
        (lambda q, k, v, o: (q, k.float(), v, o), "one dtype"),
        (lambda q, k, v, o: (q, k, v, o.long()), "int32"),
    ],
)
def test_other_input_is_refused_in_one_line(change, named):
    (q, k, v), offsets = inputs(2)
    with pytest.raises(ValueError, match=named) as error:
        attend_documents(*change(q, k, v, offsets), 8)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="window=3 without causal"):
        attend_documents(q, k, v, offsets, 8, causal=False, window=3)


def test_queries_that_are_the_latest_tokens_of_their_documents():
    """Of a row of 8 tokens in two documents, the queries of tokens 3 to 6: keys after them belong to no query."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, h, D, generator=generator, dtype=torch.float64).requires_grad_() for h in (H, 2, 2))
    offsets, key_offsets = torch.tensor([0, 2, 4, 4], dtype=torch.int32), torch.tensor([0, 5, 7, 8], dtype=torch.int32)
    out = attend_documents(q[3:7], k, v, offsets, 4, key_offsets=key_offsets, key_longest=8)
    whole = attend_documents(q, k, v, torch.tensor([0, 5, 8], dtype=torch.int32), 8)
    torch.testing.assert_close(out, whole[3:7])
    grads = [torch.autograd.grad(y.sum(), (q, k, v), retain_graph=True) for y in (out, whole[3:7])]
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted)
    shapes = (q[3:7].detach().requires_grad_(), k, v)
    torch.library.opcheck(document_attention, (*shapes, offsets, 4, True, -1, None, key_offsets, 8))
