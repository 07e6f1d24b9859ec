"""A pipeline's loss, gradients, norm and updated parameters: bitwise those of the same microbatches on one rank."""

import contextlib
import dataclasses
import os
from unittest import mock

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import parallel
from stepgraph.graph.collectives import RECV, SEND, box_of
from stepgraph.models import Llama3Config, MoEConfig, family_of
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import next_token_loss
from stepgraph.parallel.pipeline import SCHEDULES
from stepgraph.passes import configured
from stepgraph.run.spans import Waits
from stepgraph.train.validation import PipelinedLoss
from tests.distributed.ranks import TINY, global_batch, make_mesh, on_ranks, own_batch, parallel_model, whole_model
from tests.models.moe_models import DEEPSEEK

SHORT, DEEP = (dataclasses.replace(TINY, n_layers=n) for n in (2, 4))
# One dense block, then two with experts: both stages have some, whose selection biases move every step.
EXPERTS = dataclasses.replace(
    DEEPSEEK,
    moe=MoEConfig(4, 2, 24, n_shared=1, scoring="sigmoid", selection_bias=True, balance_rate=0.1),
    vocab_size=TINY.vocab_size,
)
BALANCED = dataclasses.replace(EXPERTS, moe=dataclasses.replace(EXPERTS.moe, balance_loss=0.5))
STEPS, CLIP = 2, 0.5


def adamw(params):
    return torch.optim.AdamW(list(params), lr=0.01, fused=True)


def microbatches(batch, n):
    return [{key: value.chunk(n)[k] for key, value in batch.items()} for k in range(n)]


def eager_gradients(model, loss_fn, batch, n):
    """The loss of a step of ``n`` microbatches; gradients land in ``param.grad``."""
    total = 0
    for part in microbatches(batch, n):
        loss = loss_fn(model, part) / n
        loss.backward()
        total = total + loss.detach()
    return total


def alone_model(config):
    """The model on one rank, the same on every rank."""
    if isinstance(config, Llama3Config):
        return whole_model(config)
    torch.manual_seed(0)
    return family_of(config).model(config)


def pipelined(mesh, schedule, config=DEEP, split=None, sends="point-to-point", **options):
    """The model in a pipeline, and its pipeline. ``options``: of `parallelize`."""
    with torch.device("meta"):
        model = family_of(config).model(config)
    part = {key: torch.zeros(1, 16, dtype=torch.int64) for key in ("tokens", "targets")}
    pipeline = parallel.plan_pipeline(model, one_rank_loss, part, mesh, schedule, split, sends)
    parallel.parallelize(model, mesh, TP_PLAN, device="cpu", pipeline=pipeline, **options)
    whole = dict(alone_model(config).named_parameters())
    model.init_buffers()
    for name, param in parallel.held_parameters(model).items():
        layout = parallel.layouts(model)[name]
        source = whole[name].detach()[tuple(slice(*part) for part in layout.region)]
        layout.own(param.detach().to_local()).copy_(source)
    return model, pipeline


def check_gradients(mesh, schedule, n, config=DEEP, exact=True, sends="point-to-point", **options):
    """Without an optimizer: loss and gradients as ``backward()`` leaves them."""
    alone, (model, pipeline) = whole_model(config), pipelined(mesh, schedule, config, sends=sends)
    batch = global_batch(0, 1, n)
    expected = eager_gradients(alone, one_rank_loss, batch, n)
    step = stepgraph.capture(model, next_token_loss(mesh), batch, accumulate=n, passes=configured("exact", **options))
    assert torch.equal(step(batch), expected)
    held = parallel.held_parameters(model)
    for name, param in alone.named_parameters():
        assert (name in held) == pipeline.holds(name)
        if name in held and exact:
            assert torch.equal(held[name].grad.to_local(), param.grad), (schedule, name)
        elif name in held:
            torch.testing.assert_close(held[name].grad.to_local(), param.grad, rtol=1e-5, atol=1e-7)
    return pipeline, step


def check_training(mesh, schedule, n, config=DEEP, split=None, sends="point-to-point", **options):
    """Loss, the norm of all stages' gradients, and parameters after every update; with experts their load and biases,
    those of every stage on every rank."""
    alone, (model, _) = alone_model(config), pipelined(mesh, schedule, config, split, sends)
    optimizer, held = adamw(alone.parameters()), parallel.held_parameters(model)
    ours = adamw(model.parameters())  # other ranks' among them
    step = stepgraph.capture(
        model,
        next_token_loss(mesh),
        global_batch(0, 1, n),
        ours,
        max_grad_norm=CLIP,
        accumulate=n,
        passes=configured("exact", **options),
    )
    for i in range(STEPS):
        batch = global_batch(i, 1, n)
        loss = eager_gradients(alone, one_rank_loss, batch, n)
        norm = nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {"grad_norm": norm} | stepgraph.end_of_step(alone)
        assert torch.equal(step(batch), loss), (schedule, i)
        for name, value in metrics.items():
            assert torch.equal(step.metrics[name], value), (schedule, i, name)
        for (name, buffer), other in zip(alone.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(other, buffer), (schedule, i, name)
        for name, param in alone.named_parameters():
            if name in held:
                assert torch.equal(held[name].to_local(), param), (schedule, i, name)
    assert 0 < len(held) < len(list(alone.parameters()))
    assert set(ours.state) == set(held.values())
    return step


def check_awaited(mesh, step, n, kinds=("backward", "forward")):
    """While a rank waits for a message, it can say in which call it does, and whose message that is. ``kinds``: of the
    calls in which the first and the last stage wait."""
    seen, on = [], Waits.on

    @contextlib.contextmanager
    def noted(self, *args):
        with on(self, *args):
            seen.append((step.where(), step.awaited()))
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waits, "on", noted)
        step(global_batch(0, 1, n))
    rank = mesh.place("pp")
    waits = [(f"{kinds[rank]}.{rank} of microbatch {k}", f"stage {1 - rank} on rank {1 - rank}") for k in range(n)]
    assert list(dict.fromkeys(seen)) == [*waits, ("share_loss", "")]
    assert (step.where(), step.awaited()) == ("", "")


def _check_short():
    mesh = make_mesh("pp=2")
    check_training(mesh, "dualpipev", 4)
    check_awaited(mesh, check_training(mesh, "1f1b", 2, BALANCED, split=(0, 2)), 2)
    check_symmetric(mesh)
    # Tied: the head's part of the gradient is summed over all microbatches before the embedding's is added to it, in
    # eager microbatch by microbatch: sums in another order.
    tied = dataclasses.replace(TINY, n_layers=2, tie_embeddings=True)
    pipeline, _ = check_gradients(mesh, "1f1b", 2, tied, exact=False, memory="full")
    assert pipeline.holders["embed.weight"] == (0, 1)


def check_symmetric(mesh):
    """Messages into a stage's memory, which on a CPU go point to point: the same bits, and no groups of their own."""
    pipeline, step = check_gradients(mesh, "interleaved", 2, sends="symmetric")
    assert not pipeline.channels and set(pipeline.named_groups()) == {"pp"}
    nodes = [node for graph in step.graphs.values() for node in graph.graph.nodes if node.target in (SEND, RECV)]
    assert {node.target for node in nodes} == {SEND, RECV} and all(map(box_of, nodes))
    step = check_training(mesh, "1f1b", 2, SHORT, sends="symmetric")
    check_awaited(mesh, step, 2, ("receive_backward", "receive_forward"))
    model, _ = pipelined(mesh, "zbv", sends="symmetric")
    batch = global_batch(7, 1, 1)
    expected = one_rank_loss(whole_model(DEEP), batch).detach()
    assert torch.equal(PipelinedLoss(model, next_token_loss(mesh), batch)(batch), expected)
    with pytest.raises(ValueError, match=r"^unknown stage_sends 'symetric': did you mean 'symmetric'\?$"):
        pipelined(mesh, "1f1b", sends="symetric")
    with (
        mock.patch.object(torch.distributed.ProcessGroup, "bound_device_id", torch.device("cpu")),
        pytest.raises(ValueError, match=r"^the process groups were opened with device_id=cpu.*leave device_id out"),
    ):
        pipelined(mesh, "1f1b")
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"),
        pytest.raises(ValueError, match=r"^stage_sends=symmetric over pp=2: its ranks do not share a machine; make"),
    ):
        pipelined(mesh, "1f1b", sends="symmetric")


def test_pipeline():
    on_ranks(2, _check_short)


def _check_schedule(schedule, ranks, n):
    mesh = make_mesh(f"pp={ranks}")
    config = dataclasses.replace(DEEP, n_layers=max(4, ranks * SCHEDULES[schedule].chunks))
    check_training(mesh, schedule, n, config)
    check_gradients(mesh, schedule, n, config, sends="symmetric")


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", (2, 4))
def test_every_schedule(schedule, ranks):
    on_ranks(ranks, _check_schedule, schedule, ranks, 2 * ranks)


def _check_fsdp(schedule, n, config):
    """Gradients of ``pp=2,fsdp=2`` without an optimizer: each rank's part of those that are averaged over the ranks of
    a stage microbatch by microbatch, as FSDP in eager does."""
    mesh = make_mesh("pp=2,fsdp=2")
    alone, (model, pipeline) = whole_model(config), pipelined(mesh, schedule, config)
    batch = own_batch(mesh, 0, n)
    loss_fn = next_token_loss(mesh)
    step = stepgraph.capture(model, loss_fn, batch, accumulate=n, passes=configured("exact"))
    loss, sums = step(batch), {}
    total = torch.zeros(())
    for part in microbatches(batch, n):
        mine = one_rank_loss(alone, part) / n
        mine.backward()
        total += mine.detach()
        for name, param in alone.named_parameters():
            torch.distributed.all_reduce(param.grad, group=mesh.stage_group)
            sums[name] = sums.get(name, 0) + param.grad / 2
            param.grad = None
    torch.distributed.all_reduce(total, group=mesh.stage_group)
    torch.testing.assert_close(loss, total / 2)
    held = parallel.held_parameters(model)
    for name, grad in sums.items():
        assert (name in held) == pipeline.holds(name)
        if name in held:
            layout = parallel.layouts(model)[name]
            part = grad[tuple(slice(*part) for part in layout.region)]
            assert torch.equal(layout.own(held[name].grad.to_local()), part), name


def test_fsdp_inside_a_stage():
    on_ranks(4, _check_fsdp, "1f1b", 2, SHORT)


def _trained(mesh, model, n, passes):
    """Losses and norms of training ``model``, and what this rank then holds."""
    parts, place = mesh.spec.dp_shard, mesh.place("dp_shard")
    batches = [
        {key: value.chunk(parts)[place] for key, value in global_batch(i, parts, 2 * n).items()} for i in range(STEPS)
    ]
    step = stepgraph.capture(
        model,
        next_token_loss(mesh),
        batches[0],
        adamw(model.parameters()),
        max_grad_norm=CLIP,
        accumulate=n,
        passes=passes,
    )
    results = torch.stack([torch.stack((step(batch), step.metrics["grad_norm"])) for batch in batches])
    return results, {name: p.detach().to_local() for name, p in parallel.held_parameters(model).items()}


def _check_axis(axis, replicas, cases, n):
    """What each rank of ``pp=2`` with ``axis`` has after training is bitwise what it has without stages: there, two
    replicas of that axis take the same batches, and their mean is either's."""
    mesh = make_mesh(replicas)
    expected, whole = _trained(mesh, parallel_model(mesh, DEEP), n, "exact")
    mesh = make_mesh(f"pp=2,{axis}")
    for schedule, memory in cases:
        results, held = _trained(mesh, pipelined(mesh, schedule)[0], n, configured("exact", memory=memory))
        assert torch.equal(results, expected), schedule
        assert 0 < len(held) < len(whole)
        for name, value in held.items():
            assert torch.equal(value, whole[name]), (schedule, name)
    # Passes that round differently, and the loss as it is computed on GPUs: its gradient written over the logits.
    passes = [
        dataclasses.replace(p, needs_cuda=False) if p.name == "fuse_loss" else p
        for p in configured(inductor="off", loss_chunks=2)
    ]
    results, held = _trained(mesh, pipelined(mesh, schedule)[0], n, passes)
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=0)
    for name, value in held.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "replicas", "cases"),
    [
        ("tp=2", "ddp=2,tp=2", [("zero-bubble", "full"), ("zbv", "none"), ("dualpipev", "selective")]),
        ("fsdp=2", "hsdp=2x2", [("zero-bubble", "none")]),
        pytest.param("tp=2", "ddp=2,tp=2", [("1f1b", "none"), ("interleaved", "full")], marks=pytest.mark.long),
        pytest.param(
            "fsdp=2",
            "hsdp=2x2",
            [("1f1b", "none"), ("interleaved", "full"), ("zbv", "full"), ("dualpipev", "selective")],
            marks=pytest.mark.long,
        ),
    ],
)
def test_with_another_axis(axis, replicas, cases):
    on_ranks(4, _check_axis, axis, replicas, cases, 4)
