"""Muon's products on a GPU: `gram` next to float64, and updates of stacked matrices next to eager's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.kernels.gram import TILE, gram

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("shape", [(40, 24), (300, 70), (2048, 512), (3, 260, 1032), (2, 1024, 2048)])
@pytest.mark.parametrize("turned", [False, True])
def test_gram(shape, turned):
    generator = torch.Generator(DEVICE).manual_seed(0)
    form = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    x = torch.randn(form, generator=generator, device=DEVICE).bfloat16() / shape[-1] ** 0.5
    x = x.mT if turned else x
    squares = gram(x, None, 0.0, 1.0)
    torch.testing.assert_close(squares.double(), x.double() @ x.double().mT, rtol=2**-7, atol=1e-3)
    update = gram(squares, squares, -4.775, 2.0315)
    exact = 2.0315 * (squares.double() @ squares.double().mT) - 4.775 * squares.double()
    torch.testing.assert_close(update.double(), exact, rtol=2**-7, atol=1e-2)
    for found in (squares, update):
        assert found.is_contiguous() and torch.equal(found[..., TILE:, :TILE], found.mT[..., TILE:, :TILE])
    assert torch.equal(squares, gram(x, None, 0.0, 1.0))


def test_stacked_matrices():
    """Eight matrices of 1024 x 1024 and eight of 1024 x 2048, in one stack of each form, symmetric products by half."""
    torch.manual_seed(0)
    wide = [nn.Linear(1024, 2048, bias=False) for _ in range(8)]
    eager = nn.Sequential(*(m for up in wide for m in (nn.Linear(1024, 1024, bias=False), up, nn.Tanh(), Half())))
    eager.to(DEVICE)
    model, start = copy.deepcopy(eager), copy.deepcopy(eager)
    own, theirs = (torch.optim.Muon(m.parameters(), lr=0.02) for m in (model, eager))
    batch = {name: torch.randn(4096, 1024, device=DEVICE) for name in "xy"}
    step = stepgraph.capture(model, mse, batch, own, max_grad_norm=1.0)
    report = next(r for r in step.report if r.name == "orthogonalize")
    assert report.matched == 16 and "16 of them in" in report.summary and report.changed > 16
    assert next(r for r in step.report if r.name == "fuse_updates").changed > 16
    step(batch)
    mse(eager, batch).backward()
    nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
    theirs.step()
    for a, b, old in zip(eager.parameters(), model.parameters(), start.parameters(), strict=True):
        # By what bf16 iterations amplify: eager's own are 0.03 from those in fp32.
        assert (a - b).norm() < 0.1 * (a - old).norm()


class Half(nn.Module):
    def forward(self, x):
        return x[..., :1024] + x[..., 1024:]


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])
