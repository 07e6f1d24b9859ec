"""Pipelines on GPUs: bitwise the same microbatches accumulated eagerly, by NCCL; when each rank computed."""

import dataclasses
import faulthandler
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import stepgraph
from stepgraph import parallel
from stepgraph.models import Llama3
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import next_token_loss
from stepgraph.parallel.pipeline import SCHEDULES
from stepgraph.parallel.pipeline.messages import calls_of
from stepgraph.parallel.pipeline.schedules import work_of
from stepgraph.passes import configured, get
from tests.distributed.test_pipeline_messages import direction_groups, run_messages
from tests.gpu.test_ranks_gpu import CONFIG, on_gpus
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


def pipelined(mesh, schedule):
    with torch.device("meta"):
        model = Llama3(MODEL)
    part = {key: torch.zeros(1, SEQ, dtype=torch.int64) for key in ("tokens", "targets")}
    pipeline = parallel.plan_pipeline(model, one_rank_loss, part, mesh, schedule)
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


def captured(mesh, schedule):
    """(the model, its step, which reduces gradients once)."""
    passes = configured("exact")
    at = next(i for i, p in enumerate(passes) if p.name == "reshard_after_forward")
    model, batch = pipelined(mesh, schedule), batch_of(mesh.dp_place)
    passes = [*passes[:at], get("reduce_once"), *passes[at:]]
    return model, stepgraph.capture(model, repeatable(next_token_loss(mesh)), batch, accumulate=N, passes=passes)


def check_step(mesh, model, step, batch, where):
    """One step: the loss, and gradients bit by bit."""
    loss, alone = eager(mesh, batch)
    found, held = step(batch), parallel.held_parameters(model)
    torch.testing.assert_close(found, loss)
    for name, param in alone.named_parameters():
        if name in held:
            layout = parallel.layouts(model)[name]
            part = param.grad[tuple(slice(*part) for part in layout.region)]
            grad = layout.own(held[name].grad.to_local())
            assert torch.equal(grad, part), (*where, name)
    for param in held.values():
        param.grad = None


def check(mesh, schedule):
    model, step = captured(mesh, schedule)
    for again in (1, 2, 3):  # the update's and the reduction's graphs are recorded, then replayed
        check_step(mesh, model, step, batch_of(mesh.dp_place), (schedule, again))
    check_spans(step)
    reports = {report.graph: report for report in step.report if report.name == "cuda_graph"}
    reason = reports[f"forward.{step.pipeline.own[0]}"].skipped
    assert reason == "what a stage keeps for its backward lies elsewhere for each microbatch"
    assert reports["update"].skipped is None


def check_spans(step):
    calls = [call for call, *_ in step.spans.seconds()]
    assert calls == [call for call in step.program.schedule if call.computes]
    times = [moment for _, *moments in step.spans.seconds() for moment in moments]
    assert times == sorted(times) and times[0] >= 0


@pytest.mark.parametrize(
    ("spec", "schedule"), (*(("pp=2", name) for name in SCHEDULES), ("pp=2,fsdp=2", "1f1b"), ("pp=2,fsdp=2", "zbv"))
)
def test_a_pipeline_is_bitwise_what_eager_accumulates(spec, schedule):
    on_gpus(spec, partial(check, schedule=schedule))


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
