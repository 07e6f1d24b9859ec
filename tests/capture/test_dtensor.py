"""Models whose parameters are DTensors, unsharded in forward as fully sharded data parallelism does it."""

import copy
import functools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import stepgraph
from stepgraph.graph.provenance import provenance
from tests.distributed.ranks import on_ranks

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


OPTIMIZERS = {
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "unfused": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "muon": torch.optim.Muon,  # of one rank, whose shard is the whole matrix
}


class ShardedLinear(nn.Module):
    """A linear layer whose weight is sharded over the mesh and gathered where it is used."""

    def __init__(self, linear, mesh, dtype):
        super().__init__()
        full = linear.weight.detach()
        part = full.chunk(mesh.size())[mesh.get_local_rank()].clone()
        self.weight = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
        self.dtype = dtype

    def forward(self, x):
        weight = self.weight.redistribute(placements=[Replicate()], forward_dtype=self.dtype, backward_dtype=self.dtype)
        return F.linear(x, weight.to_local(grad_placements=[Partial("avg")]))


def build(mesh, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False)]
    first, *rest = (ShardedLinear(layer, mesh, dtype) for layer in layers)
    return nn.Sequential(first, nn.Tanh(), *rest)


def loss_fn(model, batch):
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def batches(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return [
        {"x": torch.randn(4, 6, generator=generator).to(dtype), "y": torch.randn(4, 6, generator=generator)}
        for _ in range(3)
    ]


def eager_norm(model, max_norm):
    """`clip_grad_norm_` of sharded gradients returns a partial norm; its full value is what was clipped by."""
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor()


def compare(mesh, dtype, optimizer, max_grad_norm, steps=10):
    """Train eagerly and captured; every rank compares its own shards bit for bit."""
    eager, captured = build(mesh, dtype), build(mesh, dtype)
    data = batches(mesh.get_local_rank(), dtype)
    make = optimizer and (lambda model: OPTIMIZERS[optimizer](model.parameters(), lr=0.01))
    eager_optimizer = make and make(eager)
    step = stepgraph.capture(
        captured, loss_fn, data[0], make and make(captured), max_grad_norm=max_grad_norm, passes="exact"
    )
    for i in range(steps):
        batch = data[i % 3]
        expected = loss_fn(eager, batch)
        expected.backward()
        norm = eager_norm(eager, max_grad_norm) if max_grad_norm else None
        loss = step(batch)
        assert torch.equal(loss, expected), i
        assert norm is None or torch.equal(norm, step.metrics["grad_norm"]), i
        if eager_optimizer:
            eager_optimizer.step()
            eager_optimizer.zero_grad()
        for a, b in zip(eager.parameters(), captured.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), i
            if not eager_optimizer:
                assert isinstance(b.grad, DTensor)
                assert a.grad.placements == b.grad.placements
                assert torch.equal(a.grad.to_local(), b.grad.to_local()), i
                if max_grad_norm:
                    a.grad = b.grad = None
    return step


def counts(step):
    names = [str(n.target) for n in step.graph.nodes()]
    return {kind: sum(f"_c10d_functional.{kind}." in name for name in names) for kind in COLLECTIVES}


@pytest.fixture
def mesh():
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None])
def test_one_rank(mesh, dtype, optimizer):
    step = compare(mesh, dtype, optimizer, 0.1)
    assert step.graph.mesh == mesh
    found = {s.what.name for s in step.graph.inputs if s.what.kind == "parameter"}
    assert found == {"0.weight", "2.weight", "3.weight"}
    assert all(type(n.meta["val"]).__name__ == "FakeTensor" for n in step.graph.placeholders())


def test_gradients_accumulate_into_sharded_ones(mesh):
    compare(mesh, torch.float32, None, None, steps=3)


def test_replaced_shard_is_noticed(mesh):
    model = build(mesh)
    data = batches(0)
    step = stepgraph.capture(model, loss_fn, data[0], passes="exact")
    step(data[0])
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.zero_grad()
        m.double()
        m.apply(lambda layer: setattr(layer, "dtype", torch.float64))
    batch = {**data[1], "x": data[1]["x"].double()}
    expected = loss_fn(twin, batch)
    expected.backward()
    assert torch.equal(step(batch), expected)
    assert torch.equal(model[0].weight.grad.to_local(), twin[0].weight.grad.to_local())


def test_loss_that_is_a_dtensor_is_refused(mesh):
    model = build(mesh)

    def sharded(model, batch):
        return DTensor.from_local(loss_fn(model, batch), mesh, [Partial("avg")])

    with pytest.raises(stepgraph.CaptureError, match=r"returned a DTensor; return a plain tensor, such as loss.full"):
        stepgraph.capture(model, sharded, batches(0)[0])


def _two_ranks(dtype):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for optimizer in ("fused", None):
        bucketed = compare(mesh, dtype, optimizer, 0.1)
        assert counts(bucketed) == dict.fromkeys(COLLECTIVES, 1)
    batch = batches(dist.get_rank(), dtype)[0]
    step = stepgraph.capture(build(mesh, dtype), loss_fn, batch, max_grad_norm=0.1, passes=["dead_code"])
    assert counts(step) == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 3, "all_reduce": 1}
    gathers = [n for n in step.graph.nodes("forward") if "all_gather" in str(n.target)]
    scatters = [n for n in step.graph.nodes("backward") if "reduce_scatter" in str(n.target)]
    assert [provenance(n).path for n in gathers] == ["0", "2", "3"]
    assert [provenance(n).path for n in scatters] == ["3", "2", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks(dtype):
    on_ranks(2, _two_ranks, dtype)


def test_batch_of_dtensors(mesh):
    model = nn.Linear(6, 6)
    twin = copy.deepcopy(model)

    def sharded_loss(model, batch):
        return model(batch.to_local()).square().mean()

    def make(n):
        return DTensor.from_local(torch.randn(n, 6), mesh, [Shard(0)])

    step = stepgraph.capture(model, sharded_loss, make(4), passes="exact")
    for n in (4, 3):
        batch = make(n)
        expected = sharded_loss(twin, batch)
        expected.backward()
        assert torch.equal(step(batch), expected)
        assert torch.equal(model.weight.grad, twin.weight.grad)
