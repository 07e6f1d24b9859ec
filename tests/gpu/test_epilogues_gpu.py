"""Products with activations by QuACK on a GPU: against fp32, the same every time, and in a step of one CUDA graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.kernels import gated, gelu, quack
from stepgraph.passes import StepOptions

aten = torch.ops.aten
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
pytestmark = [
    pytest.mark.skipif(CAPABILITY != (9, 0), reason="measured only on compute capability 9.0"),
    pytest.mark.skipif(not quack.installed(), reason="quack-kernels is not installed"),
]


def near(found, right):
    """Within the roundings of bf16, of the largest value; sums over rows in fp32 of what bf16 rounds."""
    torch.testing.assert_close(found.float(), right, rtol=2**-7, atol=2**-8 * right.abs().max().item())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("sizes", [(512, 256, 384), (1000, 776, 1032)])
def test_kernels(sizes, approximate):
    M, K, N = sizes
    torch.manual_seed(0)

    def bf16(*shape, by=1.0):
        return (torch.randn(shape, device="cuda") * by).bfloat16()

    x, dy, weight, down, bias, z = (
        bf16(M, K),
        bf16(M, K),
        bf16(N, K, by=K**-0.5),
        bf16(K, N, by=K**-0.5),
        bf16(N),
        bf16(M, N),
    )
    for b in (bias, None):
        found = gelu.gelu_product(x, weight.t(), b, approximate)
        right = F.linear(x.float(), weight.float(), None if b is None else b.float())
        near(found[0], right)
        near(found[1], F.gelu(right, approximate=approximate))
        assert all(map(torch.equal, found, gelu.gelu_product(x, weight.t(), b, approximate)))
    for w in (down, down.t().contiguous().t(), down.view(-1)[8:].new_empty(K * N + 1)[1:].view(K, N).copy_(down)):
        found = gelu.gelu_product_backward(dy, w, z, approximate)
        right = aten.gelu_backward(dy.float() @ down.float(), z.float(), approximate=approximate)
        near(found[0], right)
        near(found[1], right.sum(0))
        assert all(map(torch.equal, found, gelu.gelu_product_backward(dy, w, z, approximate)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", [(512, 256, 384), (1000, 776, 1032)])
def test_gated_kernels(sizes, activation):
    M, K, N = sizes
    torch.manual_seed(0)
    x, dy, gate, up = (torch.randn(M, n, device="cuda").bfloat16() for n in (K, K, N, N))
    weight, down = ((torch.randn(s, device="cuda") * K**-0.5).bfloat16() for s in ((N, K), (K, N)))
    z = gate.float().requires_grad_()
    act = F.silu(z) if activation == "silu" else F.gelu(z, approximate="tanh")
    u, da = F.linear(x.float(), weight.float()), dy.float() @ down.float()
    found = gated.gated_product(x, weight.t(), gate, activation)
    near(found[0], u)
    near(found[1], act.detach() * u)
    assert all(map(torch.equal, found, gated.gated_product(x, weight.t(), gate, activation)))
    found = gated.gated_product_backward(dy, down, gate, up, activation)
    near(found[0], torch.autograd.grad(act, z, da * up.float(), retain_graph=True)[0])
    near(found[1], da * act.detach())
    assert all(map(torch.equal, found, gated.gated_product_backward(dy, down, gate, up, activation)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (256, 1024), (256, 1024), (1024, 256)
        self.norm, (self.gate, self.up, self.down) = nn.RMSNorm(256), (nn.Linear(*s, bias=False) for s in sizes)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("block", [Block, Gated])
@pytest.mark.parametrize("inductor", ["full", "off"])
def test_a_step(inductor, block):
    """The losses of five steps are near those of a step without."""

    def trained(epilogues):
        torch.manual_seed(0)
        model = nn.Sequential(*(block() for _ in range(2))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        x = torch.randn(4, 256, 256, device="cuda")

        def loss_fn(model, x):
            with torch.autocast("cuda", torch.bfloat16):
                return (model(x) - x.flip(0)).float().square().mean()

        options = StepOptions(inductor=inductor, epilogues=epilogues)
        step = stepgraph.capture(model, loss_fn, x, optimizer, passes=options)
        return torch.stack([step(x).clone() for _ in range(5)]), {r.name: r for r in step.report}

    expected, without = trained("torch")
    losses, reports = trained("quack")
    assert "product_epilogues" not in without and reports["product_epilogues"].changed == 4
    assert reports["cuda_graph"].summary == "1 CUDA graph, 0 nodes on the host", reports["cuda_graph"].notes
    assert losses[4] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-2)
