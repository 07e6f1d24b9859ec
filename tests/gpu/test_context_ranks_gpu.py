"""Two GPUs share sequences: the losses are those of one GPU, also of a long sequence, in CUDA graphs."""

import dataclasses

import pytest
import torch

import stepgraph
from stepgraph.models import Llama3, next_token_loss
from stepgraph.parallel import local_parts, parallelize
from stepgraph.parallel import next_token_loss as parallel_loss
from tests.gpu.test_ranks_gpu import CONFIG, on_gpus

LONG = dataclasses.replace(CONFIG, max_seq_len=65_536)


def _losses(model, loss_fn, batch, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0, **options)
    return step, torch.stack([step(batch).clone() for _ in range(6)])


def _check(mesh, length, documents):
    tokens = torch.randint(0, LONG.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0)).cuda()
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    if documents:
        place = torch.arange(length, device="cuda")[None]
        batch["positions"] = torch.where(place < length // 3, place, place - length // 3)
    with torch.device("meta"):
        alone, model = Llama3(LONG), Llama3(LONG)
    parallelize(model, mesh, device="cuda", param_dtype=torch.bfloat16)
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


@pytest.mark.parametrize(("length", "documents"), [(4096, True), (65_536, False)])
def test_two_gpus_share_a_sequence(length, documents):
    on_gpus("cp=2", _Check(length, documents))


@dataclasses.dataclass
class _Check:
    length: int
    documents: bool

    def __call__(self, mesh):
        _check(mesh, self.length, self.documents)
