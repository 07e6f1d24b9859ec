"""Ranks on GPUs, with NCCL: the captured step in CUDA graphs is bitwise the same program run eagerly."""

import faulthandler
import os
import socket
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import stepgraph
from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.graph.provenance import provenance
from stepgraph.kernels.comm import exchange
from stepgraph.kernels.comm.async_matmul import all_gather_matmul, matmul_reduce_scatter
from stepgraph.models import Llama3, Llama3Config
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import MeshSpec, leave, local_parts, next_token_loss, parallelize, started, world
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


def on_one_gpu(spec, function, seconds=60):
    """Ranks as processes that share one GPU, where NCCL is not to be had: their symmetric memory is true all the same.
    One that takes longer than so many seconds says where it is and ends."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = MeshSpec.parse(spec).size
    on_processes(ranks, _rank_of_one_gpu, (ranks, port, spec, function, seconds))


def _rank_of_one_gpu(rank, ranks, port, spec, function, seconds):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    faulthandler.dump_traceback_later(seconds, exit=True)
    with mock.patch.object(world, "_take_gpu", lambda: torch.cuda.set_device(0)):
        _rank(rank, ranks, port, spec, function)


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

    with mock.patch("stepgraph.passes.compile.cuda_graph.needs_host", needs_host):
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
    step = check_compiled(mesh, joined, broken_off=3)
    assert all(r.changed for r in step.report if r.name in ("async_tensor_parallel", "copy_engines"))


def check_compiled(mesh, passes=None, broken_off=None):
    (eager, optimizer), (captured, other) = build(mesh), build(mesh)
    loss_fn = next_token_loss(mesh)
    step = stepgraph.capture(
        captured, loss_fn, batch_of(mesh, 0), other, max_grad_norm=1.0, passes=passes or configured()
    )
    for i in range(5 if broken_off is None else broken_off + 4):
        if i == broken_off:  # as a step that raised leaves it: memory is made anew, graphs are recorded again
            recorded = step._current.runner.runners["step"]
            program = recorded.program
            step._session.forget(recorded.groups)
        loss, _ = eager_step(eager, loss_fn, batch_of(mesh, i), optimizer)
        torch.testing.assert_close(step(batch_of(mesh, i)), loss, rtol=5e-3, atol=5e-3)
    assert step.report[-1].summary.startswith("1 CUDA graph, 0 nodes")
    assert broken_off is None or (program and recorded.program and recorded.program is not program)
    return step


def check_muon(mesh):
    """Every rank orthogonalizes whole matrices, in the CUDA graph, with the bits of one process."""
    (model, _), loss_fn = build(mesh), repeatable_loss(mesh)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=3e-4, fused=True)]
    step = stepgraph.capture(model, loss_fn, batch_of(mesh, 0), optimizers, max_grad_norm=1.0, passes="exact")
    for i in range(4):
        report = step.verify(batch_of(mesh, i))
        assert report.bitwise, str(report)
        step(batch_of(mesh, i))
    assert step.report[-1].summary.startswith("1 CUDA graph, 0 nodes")


def check_turns(mesh):
    """Pipelines take turns between two places, without a word where one is free again: one rank is late, a graph holds
    an odd number of them, and another graph larger ones."""
    group = mesh.axis("tp").get_group()
    ranks = group.size()
    torch.manual_seed(group.rank())
    stream = torch.cuda.Stream()
    recorded = []
    for rows, count in ((256, 1), (256, 3), (1024, 2), (512, 3)):
        shard, weight = (torch.randn(size, device="cuda").bfloat16() for size in ((1, rows, 512), (512, 512)))

        def run(shard=shard, weight=weight, count=count):
            found = []
            for i in range(count):
                gathered, product = all_gather_matmul(shard + i, [weight], True, group)
                found += [gathered, product, matmul_reduce_scatter([product], [weight], 1, group)]
            if count % 2:  # an odd number of exchanges
                found += all_gather_matmul(shard, [weight], True, group)
            return found

        exchange.current().fence({group.group_name})
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        exchange.current().fence({group.group_name})
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = run()
        recorded.append((graph, shard, weight, found, count))
    for step in range(12):
        graph, shard, weight, found, count = recorded[step * 7 % len(recorded)]
        shard.normal_()
        if (step + group.rank()) % ranks:
            torch.cuda._sleep(20_000_000)
        exchange.current().fence({group.group_name})
        graph.replay()
        for i in range(count):
            parts = [torch.empty_like(shard) for _ in range(ranks)]
            dist.all_gather(parts, shard + i, group=group)
            whole = torch.cat(parts, 1)
            assert torch.equal(found[3 * i], whole), (step, i)
            assert count % 2 == 0 or i > 0 or torch.equal(found[-2], whole), step
            rows = torch.stack([part[0] @ weight for part in parts])
            torch.testing.assert_close(found[3 * i + 1], rows.flatten(0, 1))
            total = (found[3 * i + 1] @ weight).float().view(1, -1, 512)
            dist.all_reduce(total, group=group)
            mine = total.chunk(ranks, 1)[group.rank()]
            torch.testing.assert_close(found[3 * i + 2].float(), mine, rtol=2e-2, atol=4.0)


@pytest.mark.parametrize("spec", MESHES)
def test_cuda_graphs_with_nccl_are_bitwise_eager(spec):
    on_gpus(spec, check_exact)


@pytest.mark.parametrize("spec", ["fsdp=2", "tp=2", "fsdp=2,tp=2"])
def test_muon_over_shards_is_bitwise_that_of_one_process(spec):
    on_gpus(spec, check_muon)


def test_exchanges_of_muon_in_a_cuda_graph_whose_memory_is_in_expandable_segments(monkeypatch):
    """NCCL must not register such buffers: replays would hang."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    on_gpus("fsdp=2", check_muon)


def check_behind_pending_kernels(mesh):
    """The addresses of symmetric memory are not written where queued kernels still write."""
    group, device = mesh.axis("dp_shard").get_group(), torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(
        torch.cuda.Stream()
    ):  # as where a step warms up: CUDA's own default stream would be waited for
        for _ in range(3):
            torch.cuda._sleep(200_000_000)
            small = [torch.empty(2, dtype=torch.int64, device=device) for _ in range(2000)]
            torch._foreach_zero_(small)
            del small
            _, memory = compat.symmetric_memory(4096, group.group_name, device)
            torch.cuda.synchronize()
            memory.barrier(0)
            torch.cuda.synchronize()


@pytest.mark.parametrize("expandable", [False, True])
def test_symmetric_memory_behind_kernels_that_are_queued(expandable, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{expandable}")
    on_gpus("fsdp=2", check_behind_pending_kernels)


def test_a_graph_waits_for_the_collectives_that_it_began():
    on_gpus("fsdp=2", check_split)


@pytest.mark.parametrize("spec", ["fsdp=2", "fsdp=2,tp=2"])
def test_the_default_pipeline_is_one_graph_and_trains_the_same(spec):
    on_gpus(spec, check_compiled)


def test_copy_engines_are_bitwise_eager():
    on_gpus("fsdp=2", check_copies)


def test_a_step_without_kernels_of_nccl_trains_the_same():
    on_gpus("fsdp=2,tp=2", check_overlapped)


def test_pipelines_take_turns():
    on_gpus("tp=2", check_turns)
