"""Passes over collectives: bitwise the training without them, and one collective for each region, started ahead."""

import copy
import dataclasses
import functools
import itertools
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph import compat
from stepgraph.capture import phase_of
from stepgraph.costs.memory import estimate_memory
from stepgraph.costs.timeline import exposed
from stepgraph.graph import collectives
from stepgraph.parallel import next_token_loss
from stepgraph.passes import run_passes
from stepgraph.passes.contract import get
from tests.distributed.ranks import TINY, make_mesh, on_ranks, own_batch, parallel_model, whole_model

BEFORE = ["fold_constants", "remove_noop_views", "dedupe_casts", "dead_code", "dedupe_unshards", "inplace_update"]
STEPS = 2


def passes(reshard="always"):
    return [*BEFORE, get("reshard_after_forward", policy=reshard), "bucket_collectives", "overlap"]


def capture(model, mesh, chosen, accumulate=1, optimize=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) if optimize else None
    clip = 0.5 if optimize else None
    batch = own_batch(mesh, 0)
    return stepgraph.capture(
        model, next_token_loss(mesh), batch, optimizer, max_grad_norm=clip, accumulate=accumulate, passes=chosen
    )


def _check(text, tied, all_forms=True):
    mesh = make_mesh(text)
    config = dataclasses.replace(TINY, n_layers=2, tie_embeddings=tied)
    dtype = {} if all_forms else {"param_dtype": torch.bfloat16}
    for chosen, accumulate in ((passes(), 2), (passes("never"), 1))[: 1 + all_forms]:
        plain, changed = (parallel_model(mesh, config, **dtype) for _ in range(2))
        steps = capture(plain, mesh, [], accumulate), capture(changed, mesh, chosen, accumulate)
        for i in range(STEPS):
            a, b = (step(own_batch(mesh, i)) for step in steps)
            assert torch.equal(a, b), i
            assert torch.equal(steps[0].metrics["grad_norm"], steps[1].metrics["grad_norm"]), i
            for (name, x), y in zip(plain.named_parameters(), changed.parameters(), strict=True):
                assert torch.equal(x.to_local(), y.to_local()), (i, name)
    if not all_forms:
        return
    plain = parallel_model(mesh, config, param_dtype=torch.bfloat16)
    changed = parallel_model(mesh, config, param_dtype=torch.bfloat16)
    for model, chosen in ((plain, []), (changed, passes())):
        capture(model, mesh, chosen, optimize=False)(own_batch(mesh, 0))
    for (name, x), y in zip(plain.named_parameters(), changed.named_parameters(), strict=True):
        assert torch.equal(x.grad.to_local(), y[1].grad.to_local()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "world", "tied", "all_forms"),
    [
        ("fsdp=2", 2, True, False),
        pytest.param("fsdp=2", 2, True, True, marks=pytest.mark.long),
        pytest.param("ddp=2", 2, False, True, marks=pytest.mark.long),
        pytest.param("fsdp=4", 4, False, True, marks=pytest.mark.long),
        pytest.param("hsdp=2x2", 4, False, True, marks=pytest.mark.long),
        pytest.param("fsdp=2,tp=2", 4, False, False, marks=pytest.mark.long),
        pytest.param("fsdp=2,tp=2", 4, False, True, marks=pytest.mark.long),
        pytest.param("ddp=2,tp=2", 4, False, True, marks=pytest.mark.long),
    ],
)
def test_bitwise(text, world, tied, all_forms):
    on_ranks(world, _check, text, tied, all_forms)


LAYERS = 4


@pytest.fixture(scope="module")
def graph():
    """A function that applies passes to the step of a model on the first of four ranks; each is captured once."""
    compat.init_fake_world(0, 4)

    @functools.cache
    def captured(text, tied):
        mesh = make_mesh(text)
        config = dataclasses.replace(TINY, n_layers=LAYERS, tie_embeddings=tied)
        return capture(parallel_model(mesh, config), mesh, []).graph

    def apply(text, chosen, tied=False, in_flight=1):
        step = captured(text, tied)
        module = torch.fx.GraphModule(step.module, copy.deepcopy(step.graph))
        step = dataclasses.replace(step, module=module, executable=None, recording=None, log=[], in_flight=in_flight)
        run_passes(step, chosen)
        return step

    yield apply
    dist.destroy_process_group()


def counts(step):
    names = {collectives.ALL_GATHER: "gather", collectives.REDUCE_SCATTER: "scatter", collectives.ALL_REDUCE: "reduce"}
    return Counter((names[n.target], phase_of(n)) for n in step.graph.nodes if n.target in names)


def report(step, name):
    return next(r for r in step.log if r.name == name)


def test_one_collective_for_each_region(graph):
    step = graph("hsdp=2x2", passes())
    # Regions: the embedding, each block, and norm with head, which backward does not gather again.
    assert counts(step) == {
        ("gather", "forward"): LAYERS + 2,
        ("gather", "backward"): LAYERS,
        ("scatter", "backward"): LAYERS + 2,
        ("reduce", "backward"): LAYERS + 2,
        ("reduce", "loss"): 1,
        ("reduce", "optimizer"): 1,
    }
    notes = "\n".join(report(step, "bucket_collectives").notes)
    assert "all_gather_into_tensor: " in notes and "MiB" in notes and "exposed communication" in notes
    plain = graph("fsdp=4", [])
    assert counts(plain)["gather", "forward"] == len(list(whole_model().parameters())) - 9 + 9 * LAYERS
    step = graph("fsdp=4", [*BEFORE, "bucket_collectives"])
    assert counts(step)["gather", "forward"] == counts(step)["scatter", "backward"] == LAYERS + 2


def test_two_dtypes_and_tensor_parallelism(graph):
    """Gathers of the sequence stay; all-reduces of norm weights over tp have buckets of their own."""
    plain, step = graph("fsdp=2,tp=2", []), graph("fsdp=2,tp=2", passes("never"))
    norms = 1 + 2 * LAYERS
    assert counts(step)["gather", "forward"] == LAYERS + 2 + norms
    assert counts(step)["gather", "backward"] == counts(plain)["gather", "backward"]
    assert counts(step)["reduce", "backward"] == LAYERS + 1
    assert counts(step)["scatter", "backward"] == LAYERS + 2 + norms


def test_gradients_that_are_reduced_twice(graph):
    """Of norm weights: over tp, then over ddp. Neither bucket waits for what the other makes."""
    step = graph("ddp=2,tp=2", passes())
    step.graph.lint()
    # Over tp of the blocks' pairs of norms and the last norm alone; over ddp of matrices, and again of norms.
    assert counts(step)["reduce", "backward"] == (LAYERS + 1) + (LAYERS + 2) + (LAYERS + 1)
    reduced = [c for c in collectives.reductions(step) if c.node.args[1] == "avg"]
    assert len(reduced) == 2 * LAYERS + 3


def test_sums_of_more_than_two_ranks(graph):
    """Their all-reduces are not bucketed by an exact pass: the order of sums may change."""
    chosen = [*BEFORE, "bucket_collectives", "overlap"]
    params = len(list(whole_model().parameters())) - 9 + 9 * LAYERS
    step = graph("ddp=4", chosen)
    assert counts(step)["reduce", "backward"] == params
    assert f"{params} all-reduces over 4 ranks left" in report(step, "bucket_collectives").notes[-1]
    step = graph("ddp=4", [*chosen[:-1], "bucket_all_reduces", "overlap"])
    assert counts(step)["reduce", "backward"] == LAYERS + 2


def test_order(graph):
    step = graph("fsdp=4", passes())
    position = {node: i for i, node in enumerate(step.graph.nodes)}
    gathers = collectives.by_region(collectives.gathers(step))
    for this, following in itertools.pairwise(gathers):
        if this[0].half == following[0].half:  # started once the one before is there, before it is read
            assert position[this[0].wait] < position[following[0].node]
            assert position[following[0].node] < min(position[u] for u in this[0].wait.users)
    scatters = collectives.by_region(collectives.reductions(step))
    assert len(scatters) == LAYERS + 2
    for k in range(len(scatters) - 2):  # waited for once the next is started, and before the one after that
        assert position[scatters[k + 1][0].node] < position[scatters[k][0].wait] < position[scatters[k + 2][0].node]
    unordered = graph("fsdp=4", passes()[:-1])
    before, after = exposed(unordered.graph), exposed(step.graph)
    assert after[0] < before[0] and after[1] == pytest.approx(before[1])


def test_tied_parameters_are_gathered_once(graph):
    plain, step = graph("fsdp=4", [], tied=True), graph("fsdp=4", ["dedupe_unshards"], tied=True)
    assert counts(plain)["gather", "forward"] == counts(step)["gather", "forward"] + 1
    assert report(step, "dedupe_unshards").changed == 1
    assert "found nothing" not in report(step, "dedupe_unshards").line()


def test_reshard_policies(graph):
    def gathers(in_flight=1, **options):
        step = graph("fsdp=4", [*BEFORE, get("reshard_after_forward", **options)], in_flight=in_flight)
        return counts(step)["gather", "backward"], report(step, "reshard_after_forward")

    assert gathers(policy="never")[0] == 0
    assert gathers(policy="auto")[0] == 0
    assert "no memory budget is known on cpu" in gathers(policy="auto")[1].notes[0]
    assert gathers(policy="auto", budget_gib=1.0)[0] == 0
    # All that backward reads but norm and head: the embedding's backward needs no table.
    assert gathers(policy="auto", budget_gib=1e-6)[0] == gathers(policy="always")[0] == 9 * LAYERS
    # What forward keeps is there once for each microbatch that a pipeline has in flight.
    estimate = estimate_memory(graph("fsdp=4", BEFORE).graph)
    room = (estimate.peak + 1.5 * estimate.saved) / 2**30
    assert gathers(policy="auto", budget_gib=room, in_flight=2)[0] == 0
    assert gathers(policy="auto", budget_gib=room, in_flight=3)[0] == 9 * LAYERS
    with pytest.raises(ValueError, match=r"^unknown reshard policy 'allways': did you mean 'always'\?$"):
        get("reshard_after_forward", policy="allways")


def test_resharding_keeps_less(graph):
    def kept(policy):
        step = graph("fsdp=4", passes(policy))
        return estimate_memory(step.graph).saved

    assert kept("always") < kept("never")


def test_nothing_found_is_said(graph):
    """A model that is not parallel has no collectives, with a process group or without."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    step = stepgraph.capture(copy.deepcopy(model), lambda m, x: m(x).sum(), torch.ones(2, 4), passes="exact")
    for name in ("dedupe_unshards", "reshard_after_forward", "bucket_collectives", "overlap"):
        assert "found nothing to do" in report(step.graph, name).line()


def test_skipped_without_a_process_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    step = stepgraph.capture(torch.nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.ones(2, 4), passes="exact")
    assert report(step.graph, "overlap").skipped == "no process group is initialized"
