"""Pipelines on GPUs, whose step is one CUDA graph: bitwise the same microbatches accumulated eagerly, by NCCL and over
symmetric memory; when each rank computed."""

import dataclasses
import faulthandler
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import stepgraph
from stepgraph import compat, parallel
from stepgraph.graph.step_graph import InputSpec, StepGraph
from stepgraph.graph.values import Loss, TotalLoss
from stepgraph.kernels.comm import stage_sends
from stepgraph.kernels.comm.exchange import Session
from stepgraph.kernels.comm.stage_sends import sent
from stepgraph.models import Llama3
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import next_token_loss
from stepgraph.parallel.pipeline import SCHEDULES, StageGraphs
from stepgraph.parallel.pipeline.messages import calls_of
from stepgraph.parallel.pipeline.schedules import work_of
from stepgraph.passes import StepOptions, configured, get
from tests.distributed.test_pipeline_messages import direction_groups, run_messages
from tests.gpu.test_ranks_gpu import CONFIG, on_gpus, on_one_gpu
from tests.parallel.pipeline.orders import ranks_of

MODEL = dataclasses.replace(CONFIG, n_layers=4)
N, SEQ = 8, 512  # microbatches of one sequence


def batch_of(place):
    generator = torch.Generator().manual_seed(place)
    tokens = torch.randint(0, MODEL.vocab_size, (N, SEQ + 1), generator=generator).cuda()
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def repeatable(loss_fn):
    """Attention as plain products, whose gradients repeat themselves in fp32."""

    def loss(model, batch):
        with sdpa_kernel(SDPBackend.MATH):
            return loss_fn(model, batch)

    return loss


def pipelined(mesh, schedule, sends="point-to-point"):
    with torch.device("meta"):
        model = Llama3(MODEL)
    part = {key: torch.zeros(1, SEQ, dtype=torch.int64) for key in ("tokens", "targets")}
    pipeline = parallel.plan_pipeline(model, one_rank_loss, part, mesh, schedule, stage_sends=sends)
    parallel.parallelize(model, mesh, device="cuda", pipeline=pipeline)
    model.init_weights(0, parallel.local_parts(model))
    return model


def eager(mesh, batch):
    """(the loss, the model with its gradients) of the mesh's ranks: summed over microbatches, then over ranks."""
    with torch.device("cuda"):
        alone = Llama3(MODEL)
    alone.init_weights(0)
    total = 0
    for k in range(N):
        loss = repeatable(one_rank_loss)(alone, {key: value[k : k + 1] for key, value in batch.items()}) / N
        loss.backward()
        total = total + loss.detach()
    ranks = mesh.stage_group.size()
    for value in [total, *(param.grad for param in alone.parameters())] if ranks > 1 else ():
        dist.all_reduce(value, group=mesh.stage_group)
        value /= ranks
    return total, alone


def captured(mesh, schedule, sends="point-to-point", exact=True):
    """(the model, its step, which reduces gradients once)."""
    passes = configured("exact" if exact else "default")
    at = next(i for i, p in enumerate(passes) if p.name == "reshard_after_forward")
    model, batch = pipelined(mesh, schedule, sends), batch_of(mesh.dp_place)
    passes = [*passes[:at], get("reduce_once"), *passes[at:]] if exact else passes
    return model, stepgraph.capture(model, repeatable(next_token_loss(mesh)), batch, accumulate=N, passes=passes)


def check_step(mesh, model, step, batch, where, shared=True, exact=True):
    """One step: the loss, which is returned, and gradients, bit by bit where ``exact``. ``shared``: all ranks have the
    loss."""
    loss, alone = eager(mesh, batch)
    found, held = step(batch), parallel.held_parameters(model)
    if shared or step.pipeline.ranks_of[-1] == step.pipeline.rank:
        torch.testing.assert_close(found, loss)
    for name, param in alone.named_parameters():
        if name in held:
            layout = parallel.layouts(model)[name]
            part = param.grad[tuple(slice(*part) for part in layout.region)]
            grad = layout.own(held[name].grad.to_local())
            if not exact:
                torch.testing.assert_close(grad, part, rtol=1e-3, atol=1e-3 * part.abs().max().item())
            assert not exact or torch.equal(grad, part), (*where, name)
    for param in held.values():
        param.grad = None
    return found


def check_whole(mesh, schedule, shared=True, exact=True, sends="symmetric"):
    """A step is one CUDA graph: plain, recorded, replayed with other batches, and again after it was broken off, where
    what is recorded waits for flags; ranks wait for each other in turns."""
    model, step = captured(mesh, schedule, sends, exact)
    plain = (0, 4) if sends == "symmetric" else (0,)
    runner = step._current.runner
    assert step.program.recorded_whole
    for i in range(8):
        if i == 4:
            step._session.forget(runner.every_group)
        if i % 2 == mesh.place("pp") % 2:
            torch.cuda._sleep(20_000_000)
        found = check_step(mesh, model, step, batch_of(100 * i + mesh.dp_place), (schedule, i), shared, exact)
        assert runner.whole is not None, [report.line() for report in step.report if report.name == "cuda_graph"]
        assert (runner.whole.graph is None) == (i in plain), i
        if i in (2, 6):  # the caller's, which later replays must not touch
            kept = found, found.clone()
        if i in (3, 7):
            assert torch.equal(*kept)
            check_spans(step)
    lines = {report.line() for report in step.report if report.name == "cuda_graph"}
    assert all("part of the single CUDA graph of this rank's step" in line for line in lines), lines
    ends(mesh)


def ends(mesh):
    """No rank ends while another may still write into its memory."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1), group=mesh.axis("pp").get_group())


def check_spans(step):
    calls = [call for call, *_ in step.spans.seconds()]
    assert calls == [call for call in step.program.schedule if call.computes]
    times = [moment for _, *moments in step.spans.seconds() for moment in moments]
    assert times == sorted(times) and times[0] >= 0


@pytest.mark.parametrize(
    ("spec", "schedule"), (*(("pp=2", name) for name in SCHEDULES), ("pp=2,fsdp=2", "1f1b"), ("pp=2,fsdp=2", "zbv"))
)
def test_a_pipeline_is_bitwise_what_eager_accumulates(spec, schedule):
    on_gpus(spec, partial(check_whole, schedule=schedule, sends="point-to-point"))


def _large_messages(mesh):
    """Messages that no buffer of NCCL holds, where every computation waits for the whole GPU."""
    faulthandler.dump_traceback_later(90, exit=True)
    for name in SCHEDULES:
        where = ranks_of(name, 2)
        calls = calls_of(work_of(name, 2, N), where)
        groups = direction_groups()  # whose communicators the first messages make
        assert run_messages(calls, where, groups, torch.cuda.synchronize, 16 << 20, "cuda") > 0
    faulthandler.cancel_dump_traceback_later()


def test_messages_larger_than_buffers():
    on_gpus("pp=2", _large_messages)


@pytest.mark.parametrize("schedule", ("1f1b", "dualpipev"))
def test_a_run_ends(schedule, tmp_path):
    """``stepgraph train`` as a user calls it: its first step loads every kernel."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    options = ("--mesh", "pp=2", "--accumulate", "8", "--nproc", "2", "--pipeline", schedule, "--steps", "3")
    command = (sys.executable, "-m", "stepgraph", "train", "llama3-debug", *options, "--out", str(tmp_path))
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


SYMMETRIC = {schedule: partial(check_whole, schedule=schedule) for schedule in ("1f1b", "interleaved", "zbv")}


@pytest.mark.parametrize(
    ("spec", "schedule"),
    (("pp=2", "1f1b"), ("pp=2", "interleaved"), ("pp=2", "zbv"), ("pp=4", "1f1b"), ("pp=2,fsdp=2", "zbv")),
)
def test_a_whole_step_is_one_cuda_graph(spec, schedule):
    on_gpus(spec, SYMMETRIC[schedule])


def _own_loss(stages):
    """In place of the loss of all stages, a sum by NCCL: each keeps its own."""
    graph = fx.Graph()
    node = graph.placeholder("loss")
    node.meta["val"] = stages.loss
    graph.output([node])
    return StepGraph(fx.GraphModule({}, graph), [InputSpec(Loss())], [TotalLoss()])


def _alone(mesh, schedule, exact=True):
    with mock.patch.object(StageGraphs, "_share_loss", _own_loss):
        check_whole(mesh, schedule, shared=False, exact=exact)


ON_ONE_GPU = {schedule: partial(_alone, schedule=schedule) for schedule in SYMMETRIC}


@pytest.mark.parametrize("schedule", SYMMETRIC)
def test_a_whole_step_of_two_processes_of_one_gpu(schedule):
    """A step without an optimizer sends between its ranks and does nothing else with them, but for the loss."""
    on_one_gpu("pp=2", ON_ONE_GPU[schedule], seconds=120)


def test_a_compiled_whole_step_of_two_processes_of_one_gpu():
    on_one_gpu("pp=2", partial(_alone, schedule="interleaved", exact=False), seconds=240)


def _written_at_once(mesh):
    """Rank 0 has work queued when memory is made; rank 1 writes into it as soon as it can."""
    rank, group = mesh.place("pp"), mesh.axis("pp").get_group()
    if rank == 0:
        torch.cuda._sleep(1_000_000_000)
    held, memory = compat.symmetric_memory(1 << 20, group.group_name, torch.device("cuda", 0))
    if rank == 1:
        memory.get_buffer(0, (1 << 20,), torch.uint8, 0).fill_(7)
    ends(mesh)
    assert rank or held.eq(7).all()


def test_memory_that_another_rank_writes_at_once():
    on_one_gpu("pp=2", _written_at_once)


def _offloaded(mesh):
    """Optimizer state on the host, copied inside the one CUDA graph."""
    found = []
    with mock.patch.object(StageGraphs, "_share_loss", _own_loss):
        for offload in (False, True):
            model = pipelined(mesh, "1f1b", "symmetric")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            passes = StepOptions("exact", offload_optimizer=offload)
            loss_fn = repeatable(next_token_loss(mesh))
            step = stepgraph.capture(model, loss_fn, batch_of(0), optimizer, accumulate=N, passes=passes)
            for i in range(4):
                step(batch_of(i))
            assert step.program.recorded_whole and step._current.runner.whole.graph is not None
            held = parallel.held_parameters(model).values()
            found.append([(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in held])
            ends(mesh)
    assert all(map(torch.equal, *found))


def test_a_pipeline_with_optimizer_state_on_the_host():
    on_one_gpu("pp=2", _offloaded, seconds=120)


def _messages_replayed(mesh):
    """Four microbatches there and back through two places, in a CUDA graph that is replayed, next to what gloo
    moves."""
    group = mesh.axis("pp").get_group()
    x = torch.zeros(4, 300, 200, device="cuda", dtype=torch.bfloat16)
    box = [0, 2, 2, x[0].nbytes]
    sessions = {"cuda": Session(), "cpu": Session()}

    def begin(device):
        stage_sends.open_boxes(sessions[device.type], group.group_name, 2, x[0].nbytes, device)

    def run(x):
        peer, session = 1 - group.rank(), sessions[x.device.type]
        put = lambda part: torch.ops.stepgraph.send(part, peer, box, group.group_name)  # noqa: E731
        form = ([200, 300], [1, 200], x.dtype, x.device)
        take = lambda: torch.ops.stepgraph.recv(*form, peer, box, group.group_name)  # noqa: E731
        found = []
        with session:
            if group.rank() == 0:  # 1F1B
                put(x[0].t())
                for k in range(1, 4):
                    put(x[k].t())
                    found.append(take())
                found.append(take())
            else:
                for k in range(4):
                    found.append(take())
                    put((found[-1].t() + x[k]).t())
            sent(session)
        return found

    begin(x.device)
    run(x)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    begin(x.device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        moved = run(x)
    generator = torch.Generator("cuda").manual_seed(group.rank())
    for i in range(6):
        x.normal_(generator=generator)
        if i % 2 == group.rank():
            torch.cuda._sleep(20_000_000)
        graph.replay()
        if i == 3:  # and a step that is not recorded between them
            begin(x.device)
            plain = run(x)
            assert all(map(torch.equal, plain, moved))
        expected = run(x.cpu())
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(moved, expected, strict=True)), i
        assert moved[0].stride() == (1, 200)
    ends(mesh)


def test_messages_between_two_processes_of_one_gpu():
    on_one_gpu("pp=2", _messages_replayed)


def test_messages_over_symmetric_memory_replay():
    on_gpus("pp=2", _messages_replayed)
