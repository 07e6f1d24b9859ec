"""Pipelines on GPUs, with NCCL: bitwise the same microbatches accumulated eagerly; when each rank computed."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import stepgraph
from stepgraph import parallel
from stepgraph.models import Llama3
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import next_token_loss
from stepgraph.passes import configured, get
from tests.gpu.test_ranks_gpu import CONFIG, on_gpus

MODEL = dataclasses.replace(CONFIG, n_layers=4)
N, SEQ = 4, 512  # microbatches of one sequence


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


def check(mesh, schedule):
    passes = configured("exact")
    at = next(i for i, p in enumerate(passes) if p.name == "reshard_after_forward")
    model, batch = pipelined(mesh, schedule), batch_of(mesh.dp_place)
    loss, alone = eager(mesh, batch)
    passes = [*passes[:at], get("reduce_once"), *passes[at:]]
    step = stepgraph.capture(model, repeatable(next_token_loss(mesh)), batch, accumulate=N, passes=passes)
    held = parallel.held_parameters(model)
    for again in (1, 2, 3):  # the update's and the reduction's graphs are recorded, then replayed
        torch.testing.assert_close(step(batch), loss)
        for name, param in alone.named_parameters():
            if name in held:
                layout = parallel.layouts(model)[name]
                part = param.grad[tuple(slice(*part) for part in layout.region)]
                assert torch.equal(layout.own(held[name].grad.to_local()), part), (schedule, again, name)
        for param in held.values():
            param.grad = None
    check_spans(step)


def check_spans(step):
    calls = [call for call, _, _ in step.spans]
    expected = [call for call in step.program.schedule if call.graph.partition(".")[2]]
    assert calls == [call for call in expected if not call.graph.startswith(("send_", "receive_"))]
    times = [moment for _, *moments in step.spans for moment in moments]
    assert times == sorted(times) and times[0] >= 0
    assert step.waits.seconds() > 0


def check_1f1b(mesh):
    check(mesh, "1f1b")


def check_zbv(mesh):
    check(mesh, "zbv")


@pytest.mark.parametrize("spec", ("pp=2", "pp=2,fsdp=2"))
@pytest.mark.parametrize("function", (check_1f1b, check_zbv))
def test_a_pipeline_is_bitwise_what_eager_accumulates(spec, function):
    on_gpus(spec, function)
