"""Two GPUs share sequences: the losses are those of one GPU, also of a long sequence, in CUDA graphs; attention of a
chunk of queries to earlier keys is that of whole sequences."""

import dataclasses

import pytest
import torch

import stepgraph
from stepgraph.kernels.attention import attend_documents
from stepgraph.models import Llama3, next_token_loss
from stepgraph.parallel import local_parts, parallelize
from stepgraph.parallel import next_token_loss as parallel_loss
from tests.gpu.test_ranks_gpu import CONFIG, on_gpus

LONG = dataclasses.replace(CONFIG, max_seq_len=65_536)


def _losses(model, loss_fn, batch, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0, **options)
    return step, torch.stack([step(batch).clone() for _ in range(6)])


def _check(mesh, length, documents, context):
    tokens = torch.randint(0, LONG.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0)).cuda()
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    if documents:
        place = torch.arange(length, device="cuda")[None]
        batch["positions"] = torch.where(place < length // 3, place, place - length // 3)
    with torch.device("meta"):
        alone, model = Llama3(LONG), Llama3(LONG)
    parallelize(model, mesh, device="cuda", param_dtype=torch.bfloat16, context=context)
    model.init_weights(0, local_parts(model))
    alone.to_empty(device="cuda").init_weights(0)

    def bf16(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return next_token_loss(model, batch)

    step, found = _losses(model, parallel_loss(mesh), batch)
    _, expected = _losses(alone, bf16, batch)
    torch.testing.assert_close(found, expected, rtol=3e-3, atol=0)
    assert found[-1] < found[0] - 0.05
    assert step.report[-1].name == "cuda_graph" and step.report[-1].changed > 0


@pytest.mark.parametrize("context", ["ulysses", "gather"])
@pytest.mark.parametrize(("length", "documents"), [(4096, True), (65_536, False)])
def test_two_gpus_share_a_sequence(length, documents, context):
    on_gpus("cp=2", _Check(length, documents, context))


@dataclasses.dataclass
class _Check:
    length: int
    documents: bool
    context: str

    def __call__(self, mesh):
        _check(mesh, self.length, self.documents, self.context)


def test_chunks_of_queries_and_the_keys_up_to_their_ends():
    """FlashAttention 2 by offsets, of two rows: queries are the chunk from 256 to 512 of 1024 tokens, the keys after it
    belong to no query and get zeros."""
    B, T, first, c = 2, 1024, 256, 256
    q, k, v = (torch.randn(B * T, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    whole = torch.arange(B + 1, device="cuda", dtype=torch.int32) * T
    expected = attend_documents(q, k, v, whole, T).unflatten(0, (B, T))[:, first : first + c]
    chunk = q.unflatten(0, (B, T))[:, first : first + c].flatten(0, 1)
    queries, keys = ([0, c, c, 2 * c, 2 * c], [0, first + c, T, T + first + c, 2 * T])
    offsets, key_offsets = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in (queries, keys))
    found = attend_documents(chunk, k, v, offsets, c, key_offsets=key_offsets, key_longest=T).unflatten(0, (B, c))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(y, (q, k, v), grad) for y in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=4e-2)
    assert not ours[1].unflatten(0, (B, T))[:, first + c :].any()
