"""Ranks on GPUs, with NCCL: the captured step in CUDA graphs is bitwise the same program run eagerly."""

import os
import socket
import traceback
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import stepgraph
from stepgraph.capture import gradients, provenance
from stepgraph.models import Llama3, Llama3Config
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import MeshSpec, leave, local_parts, next_token_loss, parallelize, started
from stepgraph.passes import configured, exact, get
from tests.distributed.ranks import on_processes

CONFIG = Llama3Config(dim=256, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=640, vocab_size=1030, max_seq_len=2048)
#: More tokens than 3,072, from which on torch's gradient of an embedding takes another way.
BATCH, SEQ = 2, 2048
MESHES = {"fsdp=2": 2, "tp=2": 2, "fsdp=2,tp=2": 4, "hsdp=2x2": 4}


def on_gpus(spec, function):
    ranks = MeshSpec.parse(spec).size
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    on_processes(ranks, _rank, (ranks, port, spec, function))


def _rank(rank, world, port, spec, function):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "localhost", **{name: str(number) for name, number in numbers.items()}}
    torch.use_deterministic_algorithms(True)
    with started(MeshSpec.parse(spec), "cuda") as mesh:
        try:
            function(mesh)
        except BaseException:
            traceback.print_exc()  # it holds CUDA graphs, for whose end NCCL would wait
            leave(1)


def build(mesh):
    with torch.device("meta"):
        model = Llama3(CONFIG)
    parallelize(model, mesh, TP_PLAN, device="cuda", param_dtype=torch.bfloat16)
    model.init_weights(0, local_parts(model))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def batch_of(mesh, step):
    generator = torch.Generator().manual_seed(1000 * step + mesh.dp_place)
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ + 1), generator=generator).cuda()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}  # slices, as they come


def eager_step(model, loss_fn, batch, optimizer):
    loss = loss_fn(model, batch)
    loss.backward()
    params = list(model.parameters())
    clipped, norm = gradients.clip({i: p.grad.to_local() for i, p in enumerate(params)}, params, 1.0)
    for i, param in enumerate(params):
        param.grad.to_local().copy_(clipped[i])
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def repeatable_loss(mesh):
    """The loss with flash attention, whose gradient repeats itself under deterministic algorithms; cuDNN's does not."""
    plain = next_token_loss(mesh)

    def loss_fn(model, batch):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return plain(model, batch)

    return loss_fn


def assert_same(expected, actual, what):
    for (name, a), b in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), f"{what}: {name}"


def check_exact(mesh):
    step = trained_as_eager(mesh)
    assert step.report[-1].name == "cuda_graph" and step.report[-1].changed > 0


def check_split(mesh, passes="exact"):
    """A node on the host ends a graph while the next block's parameters are being gathered."""

    def needs_host(node):
        in_the_middle = node.target is torch.ops.aten.silu.default and provenance(node).path.startswith("layers.1")
        return "a test says so" if in_the_middle else None

    with mock.patch("stepgraph.passes.cuda_graph.needs_host", needs_host):
        step = trained_as_eager(mesh, passes)
    assert step.report[-1].summary.startswith("2 CUDA graphs, 1 node")


def check_copies(mesh):
    """Two ranks add in one order only."""
    step = trained_as_eager(mesh, by_copy_engines())
    report = next(r for r in step.report if r.name == "copy_engines")
    assert report.changed > 2 * CONFIG.n_layers
    check_split(mesh, by_copy_engines())


def by_copy_engines():
    *before, graph = exact()
    return [*before, get("copy_engines"), graph]


def trained_as_eager(mesh, passes="exact"):
    (eager, optimizer), (again, second), (captured, other) = build(mesh), build(mesh), build(mesh)
    loss_fn = repeatable_loss(mesh)
    step = stepgraph.capture(captured, loss_fn, batch_of(mesh, 0), other, max_grad_norm=1.0, passes=passes)
    for i in range(5):
        loss, norm = eager_step(eager, loss_fn, batch_of(mesh, i), optimizer)
        eager_step(again, loss_fn, batch_of(mesh, i), second)
        assert torch.equal(step(batch_of(mesh, i)), loss)
        assert torch.equal(step.metrics["grad_norm"], norm)
    assert_same(eager, again, "eager does not repeat itself")
    assert_same(eager, captured, "differs from eager")
    return step


def check_overlapped(mesh):
    """Everything that communicates without NCCL's kernels."""
    passes = configured(async_tp=True, copy_engines=True)
    joined = [p.with_options(unprofitable=True) if p.name == "async_tensor_parallel" else p for p in passes]
    step = check_compiled(mesh, joined)
    assert all(r.changed for r in step.report if r.name in ("async_tensor_parallel", "copy_engines"))


def check_compiled(mesh, passes=None):
    (eager, optimizer), (captured, other) = build(mesh), build(mesh)
    loss_fn = next_token_loss(mesh)
    step = stepgraph.capture(
        captured, loss_fn, batch_of(mesh, 0), other, max_grad_norm=1.0, passes=passes or configured()
    )
    for i in range(5):
        loss, _ = eager_step(eager, loss_fn, batch_of(mesh, i), optimizer)
        torch.testing.assert_close(step(batch_of(mesh, i)), loss, rtol=5e-3, atol=5e-3)
    assert step.report[-1].summary.startswith("1 CUDA graph, 0 nodes")
    return step


@pytest.mark.parametrize("spec", MESHES)
def test_cuda_graphs_with_nccl_are_bitwise_eager(spec):
    on_gpus(spec, check_exact)


def test_a_graph_waits_for_the_collectives_that_it_began():
    on_gpus("fsdp=2", check_split)


@pytest.mark.parametrize("spec", ["fsdp=2", "fsdp=2,tp=2"])
def test_the_default_pipeline_is_one_graph_and_trains_the_same(spec):
    on_gpus(spec, check_compiled)


def test_copy_engines_are_bitwise_eager():
    on_gpus("fsdp=2", check_copies)


def test_a_step_without_kernels_of_nccl_trains_the_same():
    on_gpus("fsdp=2,tp=2", check_overlapped)
