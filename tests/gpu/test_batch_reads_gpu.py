"""What Python reads of a batch on a GPU: computed again on the host, with the GPU's bits."""

import copy

import pytest
import torch

import stepgraph
from tests.capture.conftest import eager_step
from tests.capture.test_batch_reads import LOOKS, Looks, Strided, batches, loss_fn


def moved():
    return [{name: value.cuda() for name, value in batch.items()} for batch in batches()]


@pytest.mark.parametrize("look", [look for look in LOOKS if look != "written"])  # its literals lie on the CPU
def test_values_of_a_batch_on_a_gpu(deterministic, look):
    read, forms = LOOKS[look]
    model = Looks(read).cuda()
    twin = copy.deepcopy(model)
    ours, eager = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (twin, model))
    step = stepgraph.capture(twin, loss_fn, moved()[0], ours, max_grad_norm=1.0, passes="exact")
    for batch in moved():
        assert torch.equal(step(batch), eager_step(model, loss_fn, batch, eager, 1.0, 1)[0])
    assert len(step._forms) == forms


def test_an_integer_buffer_on_a_gpu(deterministic):
    model, x = Strided().cuda(), {"x": torch.randn(6, 6, device="cuda")}
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    for stride in (2, 3):
        model.stride.fill_(stride)
        assert step.verify(x).bitwise
