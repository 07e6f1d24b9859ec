"""Experts spread over the ranks of a pipeline's stage: as one rank has it, and buffers that all stages agree on."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph import parallel
from stepgraph.graph.collectives import ALL_REDUCE, group_of
from stepgraph.graph.facts import upstream
from stepgraph.graph.values import Ratio
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import next_token_loss
from stepgraph.parallel.experts import capacity_of
from stepgraph.train.validation import PipelinedLoss
from tests.distributed.ranks import global_batch, in_fake_world, make_mesh, on_ranks, own_batch
from tests.distributed.test_pipeline import CLIP, EXPERTS, alone_model, pipelined

N = 2  # microbatches of one sequence


def one_expert_rank(model):
    """Tokens of the last layer of experts, which is on the last stage, all go to the experts of one rank."""
    *_, (name, bias) = [(n, b) for n, b in model.named_buffers() if n.endswith("bias")]
    bias.copy_(torch.tensor([10.0, 10.0, 0.0, 0.0]))
    return name


def captured(mesh, model, n=N):
    optimizer = torch.optim.SGD(list(parallel.held_parameters(model).values()), lr=0.1)
    return stepgraph.capture(
        model,
        next_token_loss(mesh),
        own_batch(mesh, 0, n),
        optimizer,
        max_grad_norm=CLIP,
        accumulate=n,
        passes="exact",
    )


def check(exchange="collectives"):
    mesh, options = make_mesh("pp=2,ep=2"), {"expert_capacity": 1.5, "expert_exchange": exchange}
    alone, (model, _) = alone_model(EXPERTS), pipelined(mesh, "1f1b", EXPERTS, (0, 2), **options)
    assert mesh.experts.axis("ep").size() == 2 and mesh.stage_group.size() == 2
    optimizer, step = torch.optim.SGD(alone.parameters(), lr=0.1), captured(mesh, model)
    for i, repeated in enumerate((0, 1)):
        if repeated:  # the last stage's buffers are too small, the first one's are not
            assert one_expert_rank(alone) == one_expert_rank(model)
        batch = global_batch(i, mesh.spec.dp, N)
        loss = one_rank_loss(alone, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        load = stepgraph.end_of_step(alone)["expert_load"]
        # Sums over ranks' tokens, microbatches and experts' rows in another order than one rank's.
        torch.testing.assert_close(step(own_batch(mesh, i, N)), loss.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(step.metrics["grad_norm"], norm, rtol=1e-4, atol=0)
        assert torch.equal(step.metrics["expert_load"], load)
        assert step.metrics["repeated"] == repeated, (i, dist.get_rank())
        for name, param in alone.named_parameters():
            if name in (held := parallel.held_parameters(model)):
                layout = parallel.layouts(model)[name]
                part = param.detach()[tuple(slice(*part) for part in layout.region)]
                torch.testing.assert_close(layout.own(held[name].detach().to_local()), part, rtol=1e-4, atol=1e-6)
        for (name, buffer), ours in zip(alone.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(ours, buffer), name
    assert capacity_of(model).multiple == 3.0
    check_ratios(step)
    check_validation(mesh, alone, model)


def check_validation(mesh, alone, model):
    """No token is dropped there either: all ranks capture forward again with larger buffers."""
    capacity_of(model).multiple = 1.0
    one_expert_rank(alone), one_expert_rank(model)
    alone.eval(), model.eval()
    with torch.no_grad():
        expected = one_rank_loss(alone, global_batch(3, mesh.spec.dp, N))
        batch = own_batch(mesh, 3, N)
        pipelined_loss = PipelinedLoss(model, next_token_loss(mesh), batch)
        for _ in range(2):
            torch.testing.assert_close(pipelined_loss(batch), expected, rtol=1e-5, atol=0)
    assert capacity_of(model).multiple == 2.0


def check_ratios(step):
    """A stage gives the ratios of its own layers as one, and none travels; the update has the highest of all ranks."""
    for name, graph in step.graphs.items():
        ratios = [what for what in graph.outputs if isinstance(what, Ratio)]
        assert len(ratios) == name.startswith(("forward", "update")), name
    for name in {"send_forward.0", "receive_backward.0"} & step.graphs.keys():  # the residual stream, and no ratio
        (message,) = (n for n in step.graphs[name].graph.nodes if n.op != "output" and n.meta["val"].numel())
        assert message.meta["val"].ndim == 3
    update = step.graphs["update"]
    ratio = next(node for node, what in update.returned() if isinstance(what, Ratio))
    highest = [n for n in upstream(ratio) if n.target is ALL_REDUCE and n.args[1] == "max"]
    axes = {update.axes[group_of(node)].removeprefix("mesh_") for node in highest}
    assert axes == {"dp_shard", "ep", "pp"}


def _check_alone():
    """One rank's graphs, of a world that is not there."""
    model, _ = pipelined(mesh := make_mesh("pp=2,ep=2"), "1f1b", EXPERTS, (0, 2), expert_capacity=1.5)
    check_ratios(captured(mesh, model))


def test_a_stage_tells_its_own_level():
    in_fake_world(0, 4, _check_alone)


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["collectives", "symmetric"])
def test_all_stages_agree_on_larger_buffers(exchange):
    on_ranks(4, check, exchange)


def _train(text, schedule, folder, split=None):
    """Train on the mesh ``text``; what this rank holds goes to a file."""
    mesh, config, n = make_mesh(text), dataclasses.replace(EXPERTS, n_layers=5), 4
    if schedule:
        model, _ = pipelined(mesh, schedule, config, split, expert_capacity=0.3)
    else:
        model = parallel.parallelize(alone_model(config), mesh, {}, expert_capacity=0.3)
    step = captured(mesh, model, n)
    found = [(step(own_batch(mesh, i, n)), *step.metrics.values()) for i in range(2)]
    values = {name: param.detach().to_local() for name, param in parallel.held_parameters(model).items()}
    torch.save({"results": found, "values": values}, folder / f"{text}-{dist.get_rank()}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "split"),
    [
        ("zero-bubble", None),
        *(pytest.param(name, None, marks=pytest.mark.long) for name in ("1f1b", "dualpipev")),
        pytest.param("1f1b", (0, 1), marks=pytest.mark.long),  # no expert in stage 0
    ],
)
def test_bitwise_what_the_mesh_gives_without_a_pipeline(schedule, split):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_ranks(2, _train, "fsdp=2,ep=2", None, folder)
        on_ranks(4, _train, "pp=2,ep=2", schedule, folder, split)
        for rank in range(4):
            ours = torch.load(folder / f"pp=2,ep=2-{rank}")
            theirs = torch.load(folder / f"fsdp=2,ep=2-{rank % 2}")
            for one, other in zip(ours["results"], theirs["results"], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            assert 0 < len(ours["values"]) < len(theirs["values"])
            for key, value in ours["values"].items():
                assert torch.equal(value, theirs["values"][key]), key
