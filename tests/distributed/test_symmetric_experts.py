"""Experts' tokens by the operators of symmetric memory, over gloo point to point: bitwise as by the collectives."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.graph.collectives import COUNTS_BEGIN, ROWS_BEGIN, operator_of, stage_of
from stepgraph.graph.provenance import phase_of, role_of
from stepgraph.models import family_of
from stepgraph.parallel import next_token_loss, parallelize
from stepgraph.parallel.expert_symmetric import SymmetricExchange
from stepgraph.passes import configured
from tests.distributed.expert_model import EXPERTS, SLOTS, VOCAB, parallel_model
from tests.distributed.ranks import in_fake_world, make_mesh, on_ranks
from tests.distributed.test_experts import CLIP, adamw, assert_same_state, check_one_rank, check_training, own_batch
from tests.models.moe_models import DEEPSEEK, our_model

STEPS = 2


def chosen(memory="none"):
    """The exact passes, with more room for what runs next to exchanges: a model so small is nearly all temporary."""
    passes = configured("exact", memory=memory, cuda_graph=False)
    return [p.with_options(memory=4.0) if p.name == "overlap_experts" else p for p in passes]


def trained(mesh, exchange, collapsed, **options):
    """(losses, norms, how often each step was repeated, model, step) of a model whose buffers are too small where every
    token goes to the experts of one rank."""
    torch.manual_seed(7)
    capacity = 0.6 if collapsed else 2.0
    model = parallel_model(mesh, collapsed, expert_exchange=exchange, expert_capacity=capacity, **options).train()
    step = stepgraph.capture(
        model, next_token_loss(mesh), own_batch(mesh, 0), adamw(model), max_grad_norm=CLIP, passes=chosen()
    )
    found = []
    for i in range(STEPS):
        loss = step(own_batch(mesh, i))
        found.append((loss, step.metrics["grad_norm"], int(step.metrics["repeated"])))
    return *zip(*found, strict=True), model, step


def check_same_bits(mesh, chunks, routings=(True,)):
    """Where all tokens are collapsed at first, the second step finds them routed anew."""
    for collapsed in routings:
        runs = [trained(mesh, e, collapsed, expert_chunks=chunks) for e in ("collectives", "symmetric")]
        (losses, norms, repeats, model, _), (found, other_norms, others, same, step) = runs
        assert all(map(torch.equal, losses, found)) and all(map(torch.equal, norms, other_norms))
        assert repeats == others == (int(collapsed), 0)
        assert_same_state(model, same)
        check_nodes(step.graph, mesh, chunks)
        report = next(r for r in step.report if r.name == "overlap_experts")
        assert report.changed > 0, report.line()


def check_nodes(graph, mesh, chunks):
    """Every exchange over ep is one of ours, with a role, and ends in the order in which it begins."""
    found, order = {}, {"begin": [], "end": []}
    for node in graph.graph.nodes:
        operator, role = operator_of(node), role_of(node)
        if operator is None or role is None or role.kind not in ("dispatch", "combine"):
            continue
        assert operator.exchange and role.axis == "ep", node
        if operator.stage == "begin":
            key = phase_of(node), role.kind, node.target
            found[key] = found.get(key, 0) + 1
            (end,) = node.users
            assert role_of(end) == role and stage_of(end) == "end"
        if operator.kind == "all_to_all":
            order[operator.stage].append(node if operator.stage == "begin" else node.args[0])
    n = 2 * chunks  # layers
    assert found == {
        ("forward", "dispatch", COUNTS_BEGIN): n,
        ("forward", "dispatch", ROWS_BEGIN): n,
        ("forward", "combine", ROWS_BEGIN): n,
        ("backward", "combine", ROWS_BEGIN): n,
        ("backward", "dispatch", ROWS_BEGIN): n,
    }
    assert order["begin"] == order["end"]


def check_what_travels(mesh):
    """As many rows leave as there are for experts of other ranks, and no more."""
    model, sent = parallel_model(mesh, expert_exchange="symmetric"), []
    isend = dist.isend

    def counting(tensor, *args, **options):
        sent.append(tensor)
        return isend(tensor, *args, **options)

    with torch.no_grad(), mock.patch.object(dist, "isend", counting):
        moe, x = model.layers[0].moe, torch.randn(2, 8, 16)
        scores = moe.router(x.flatten(0, 1)).softmax(-1)
        moe(x)
    here = EXPERTS // mesh.spec.ep
    elsewhere = scores.topk(SLOTS)[1] // here != mesh.experts.axis("ep").get_local_rank()
    counts, there, *_ = sent
    assert counts.numel() == EXPERTS and there.shape[0] == elsewhere.sum() > 0


def _check(text, chunks):
    mesh = make_mesh(text)
    check_same_bits(mesh, chunks)
    check_what_travels(mesh)


def test_two_ranks():
    on_ranks(2, _check, "fsdp=2,ep=2", 2)


def _check_more(text):
    mesh = make_mesh(text)
    check_one_rank(mesh, expert_exchange="symmetric")
    check_training(mesh, 2, expert_exchange="symmetric", param_dtype=torch.bfloat16)
    check_same_bits(mesh, 1, (False, True))
    # The models' own layers, recomputed, and compiled by Inductor.
    config = dataclasses.replace(DEEPSEEK, n_layers=2, vocab_size=VOCAB)
    for memory, passes in (("full", chosen("full")), ("none", configured())):
        losses = []
        for exchange in ("collectives", "symmetric"):
            model = our_model(config)
            parallelize(model, mesh, family_of(config).tp_plan(config), expert_exchange=exchange)
            step = stepgraph.capture(model, next_token_loss(mesh), own_batch(mesh, 0), adamw(model), passes=passes)
            losses.append([step(own_batch(mesh, i)) for i in range(STEPS)])
        same = torch.equal if memory == "full" else torch.allclose
        assert all(map(same, *losses)), losses


@pytest.mark.long
@pytest.mark.parametrize(("text", "world"), [("ep=2,tp=2", 2), ("fsdp=4,ep=4", 4), ("hsdp=2x2,ep=2", 4)])
def test_mesh(text, world):
    on_ranks(world, _check_more, text)


def _refused():
    mesh = make_mesh("fsdp=4,ep=4")
    with pytest.raises(ValueError, match=r"^unknown expert_exchange 'symetric': did you mean 'symmetric'\?$"):
        parallel_model(mesh, expert_exchange="symetric")
    with (
        mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "2"}),
        pytest.raises(ValueError, match=r"^expert_exchange=symmetric over ep=4: its ranks do not share a machine;"),
    ):
        parallel_model(mesh, expert_exchange="symmetric")
    model = parallel_model(mesh, expert_exchange="symmetric")
    assert isinstance(model.layers[0].moe.exchange, SymmetricExchange)


def test_what_cannot_be_is_refused():
    in_fake_world(0, 4, _refused)
