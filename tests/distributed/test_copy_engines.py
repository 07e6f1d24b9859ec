"""Gathers and reductions by copy engines: the operators, and training with the pass on gloo ranks."""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph import compat
from stepgraph.capture import phase_of
from stepgraph.graph import collectives
from stepgraph.kernels.comm import copy_collectives, exchange
from stepgraph.parallel import next_token_loss
from stepgraph.passes import configured
from stepgraph.passes.contract import get
from tests.distributed.ranks import TINY, in_fake_world, make_mesh, on_ranks, own_batch, parallel_model
from tests.distributed.test_muon import optimizers

BEFORE = [
    *("fold_constants", "remove_noop_views", "dedupe_casts", "dead_code", "inplace_update", "reshard_after_forward"),
    *("bucket_collectives", "overlap"),
]
STEPS, LAYERS = 2, 2


def _check_operators():
    group, ranks, rank = dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank()
    ops = torch.ops.stepgraph
    values = torch.arange(ranks * 7 * 3, dtype=torch.float32).view(ranks, 7, 3) / 3
    one, two = values[rank], values[rank, 0] + 0.1
    first = ops.gather_begin([one, two], [21, 3], torch.bfloat16, ranks, group)
    second = ops.gather_begin([two], [3], torch.float32, ranks, group)  # while the first is under way
    wholes = ops.gather_end(first, [21, 3], torch.bfloat16, ranks, group)
    assert torch.equal(wholes[0], values.bfloat16().flatten())
    assert torch.equal(wholes[1], (values[:, 0] + 0.1).bfloat16().flatten())
    (whole,) = ops.gather_end(second, [3], torch.float32, ranks, group)
    assert torch.equal(whole, (values[:, 0] + 0.1).flatten())
    joined = ops.gather_begin([one, two], [24], torch.float32, ranks, group)  # one whole of several shards
    (whole,) = ops.gather_end(joined, [24], torch.float32, ranks, group)
    assert torch.equal(whole, torch.cat([values.flatten(1), values[:, 0] + 0.1], 1).flatten())

    torch.manual_seed(0)
    grads = torch.randn(ranks, 2 * ranks, 5, dtype=torch.bfloat16)  # each rank's
    mine = [grads[rank], grads[rank] * 2]
    total = ops.reduce_end(ops.reduce_begin(mine, ranks, group), mine, False, torch.float32, ranks, group)
    expected = grads.double().sum(0).chunk(ranks)[rank].flatten()
    expected = torch.cat([expected, 2 * expected])
    # float32: one rounding a rank, of at most 2^-24 of the sum of magnitudes; bfloat16: one, of 2^-9, at the end.
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=ranks * 2**-21)
    mean = ops.reduce_end(ops.reduce_begin(mine, ranks, group), mine, True, torch.bfloat16, ranks, group)
    torch.testing.assert_close(mean.double(), expected / ranks, rtol=2**-8, atol=ranks * 2**-21)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_operators(ranks):
    on_ranks(ranks, _check_operators)


def capture(mesh, chosen, param_dtype=torch.bfloat16, **options):
    model = parallel_model(mesh, dataclasses.replace(TINY, n_layers=LAYERS), param_dtype=param_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    loss_fn, batch = next_token_loss(mesh), own_batch(mesh, 0)
    return model, stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=0.5, passes=chosen, **options)


def targets(step):
    return [node.target for node in step.graph.graph.nodes if node.target in (*COPIED, *REPLACED)]


OURS = tuple(op for op, found in collectives.OPERATORS.items() if found.stage == "joined")
COPIED = tuple(op for op in collectives.EXCHANGES if op not in OURS)
REPLACED = (collectives.ALL_GATHER, collectives.REDUCE_SCATTER)


def _check_training(text, param_dtype, exact, accumulate=1):
    mesh = make_mesh(text)
    plain, step = capture(mesh, BEFORE, param_dtype, accumulate=accumulate)
    changed, copied = capture(mesh, [*BEFORE, "copy_engines"], param_dtype, accumulate=accumulate)
    assert targets(copied).count(collectives.GATHER_BEGIN) >= LAYERS + 2
    for i in range(STEPS):
        batch = own_batch(mesh, i)
        loss, expected = copied(batch), step(batch)
        if exact:
            assert torch.equal(loss, expected)
            assert torch.equal(copied.metrics["grad_norm"], step.metrics["grad_norm"])
        else:  # sums of float32 in another order
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for (name, a), b in zip(plain.named_parameters(), changed.parameters(), strict=True):
        a, b = a.to_local(), b.to_local()
        assert torch.equal(a, b) if exact else (a - b).abs().mean() < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "ranks", "param_dtype"),
    [
        ("fsdp=2", 2, torch.bfloat16),
        pytest.param("fsdp=2", 2, torch.float32, marks=pytest.mark.long),
        pytest.param("fsdp=2,tp=2", 4, torch.bfloat16, marks=pytest.mark.long),
        pytest.param("hsdp=2x2", 4, torch.bfloat16, marks=pytest.mark.long),
        pytest.param("fsdp=3", 3, torch.float32, marks=pytest.mark.long),
    ],
)
def test_training(text, ranks, param_dtype):
    """Two ranks add in one order only: every bit is that of the collectives."""
    on_ranks(ranks, _check_training, text, param_dtype, text != "fsdp=3")


@pytest.mark.long
def test_microbatches():
    on_ranks(2, _check_training, "fsdp=2", torch.bfloat16, True, 2)


def report(step):
    return next(r for r in step.graph.log if r.name == "copy_engines")


def _replaced():
    _, step = capture(make_mesh("fsdp=2,tp=2"), [*BEFORE, "copy_engines"])
    found, nodes = report(step), step.graph.graph.nodes
    assert found.matched == found.changed > 2 * LAYERS and not found.summary.startswith("0 of")
    assert all("MiB received by each rank, of bfloat16" in note for note in found.notes[:2])
    assert "exposed communication" in found.notes[-1]
    # Casts and copies into buckets went with what begins: parameters and gradients as they are.
    for node in nodes:
        if node.target is collectives.GATHER_BEGIN:
            assert all(n.op == "placeholder" for n in node.args[0])
            assert node.args[2] is torch.bfloat16
        if node.target is collectives.REDUCE_BEGIN:
            assert {n.meta["val"].dtype for n in node.args[0]} == {torch.bfloat16}
        if node.target is collectives.REDUCE_END:
            assert node.args[3] is torch.float32 and phase_of(node) == "backward"
    assert not collectives.gathers(step.graph)
    left = collectives.reductions(step.graph)
    assert {c.node.target for c in left} == {collectives.ALL_REDUCE}  # norm weights over the ranks of tp

    groups = {compat.group_name(node.args[-1]) for node in nodes if node.target in COPIED}
    assert collectives.exchanging(step.graph.graph) == groups


def _behind_pipelines():
    """A copy engine takes one copy after the other: parameters go behind the activations that a product waits for."""
    chosen = [*BEFORE, get("async_tensor_parallel", unprofitable=True), "copy_engines"]
    _, step = capture(make_mesh("fsdp=2,tp=2"), chosen)
    order = [n.target for n in step.graph.graph.nodes if phase_of(n) == "forward" and n.target in (*OURS, *COPIED)]
    begins = [i for i, target in enumerate(order) if target is collectives.GATHER_BEGIN]
    assert [order[i - 1] for i in begins[2:]] == [
        collectives.ALL_GATHER_MATMUL
    ] * LAYERS  # the next block's, the head's
    assert f"{LAYERS} gathers begin later, after the next product" in "".join(report(step).notes)


def _two_machines():
    with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "2"}):
        _, step = capture(make_mesh("fsdp=2,tp=2"), [*BEFORE, "copy_engines"])
    assert report(step).changed == 0
    assert any("all_gather_into_tensor: its ranks do not share a machine" in note for note in report(step).notes)


def _beside_muon():
    mesh = make_mesh("fsdp=4")
    model = parallel_model(mesh, dataclasses.replace(TINY, n_layers=1), param_dtype=torch.bfloat16)
    own = optimizers(model, ns_steps=1)
    step = stepgraph.capture(
        model, next_token_loss(mesh), own_batch(mesh, 0), own, max_grad_norm=0.5, passes=[*BEFORE, "copy_engines"]
    )
    assert report(step).changed == 0 < report(step).matched
    assert any("the step has an NCCL all_to_all_single" in note for note in report(step).notes)


def _replaced_and_left():
    for check in (_replaced, _behind_pipelines, _two_machines, _beside_muon):
        check()


def test_what_is_replaced():
    in_fake_world(0, 4, _replaced_and_left)


def linear_step():
    model, batch = torch.nn.Linear(3, 1), torch.ones(2, 3)
    step = stepgraph.capture(model, lambda model, batch: model(batch).sum(), batch, passes="exact")
    return step, batch, step._current.runner


def test_a_step_that_is_broken_off_is_forgotten():
    """What it began would be taken for what the next step begins, and its flags for theirs."""
    memory, groups = mock.Mock(turns=1), frozenset({"a group"})
    step, batch, runner = linear_step()
    session = runner.session
    session.under_way["gather", "a group"].append(object())
    session.workspaces["a group", ("gather", 0)] = memory
    before = session.age(groups)
    with (
        mock.patch.object(runner, "every_group", groups),
        mock.patch.object(runner, "runners", {"step": mock.Mock(side_effect=MemoryError)}),
        pytest.raises(MemoryError),
    ):
        step(batch)
    assert copy_collectives.under_way(session) == [] and not session.workspaces
    assert session.broken == [memory]  # others may still write there
    assert session.age(groups) == before + 1  # what CUDA graphs recorded with it does not run again


def test_a_step_that_exchanges_nothing_leaves_exchanges_alone():
    """One rank may run it by itself."""
    held = mock.Mock(turns=2, turn=1)
    step, batch, runner = linear_step()
    runner.session.workspaces["a group", None] = held
    step(batch)
    with (
        mock.patch.object(runner, "runners", {"step": mock.Mock(side_effect=MemoryError)}),
        pytest.raises(MemoryError),
    ):
        step(batch)
    assert runner.session.workspaces and held.turn == 1 and not held.memory.barrier.called


def test_each_step_has_a_session_of_its_own():
    """Operators use the session of the step that runs, and outside any step the process's own."""
    (_, batch, one), (_, _, other) = linear_step(), linear_step()
    assert one.session is not other.session
    seen = []
    with mock.patch.object(one, "runners", {"step": lambda flat: seen.append(exchange.current()) or []}):
        one.program.graphs["step"].outputs = []
        one([batch])
    assert seen == [one.session] and exchange.current() not in (one.session, other.session)


@pytest.mark.parametrize("place", [None, ("gather", 0)])
def test_places_in_memory(place):
    """Each part has a place of its own, each turn's too; turns are counted from where a step begins."""
    ranks, like, written = 3, torch.zeros(5, dtype=torch.bfloat16), []

    def buffer(holder, shape, dtype, start):
        written.append((holder, 2 * start, 2 * start + 2 * shape.numel()))

    memory, group = mock.Mock(get_buffer=buffer), mock.Mock(group_name="a group")
    group.size.return_value, group.rank.return_value = ranks, 1
    with (
        mock.patch.object(exchange.compat, "symmetric_memory", return_value=(None, memory)) as made,
        mock.patch.object(torch.cuda, "Stream"),
    ):
        session = exchange.Session()
        held = session.workspace(group, 16, torch.device("cpu"), place)
        assert session.workspace(group, 8, torch.device("cpu"), place) is held
        turns = [held.take_turn() for _ in range(3)]
        session.fence({"another"})
        assert held.turn == 1 - (place is not None)
        session.fence({"a group"})
        turns.append(held.take_turn())
        larger = session.workspace(group, 32, torch.device("cpu"), place)
        assert larger is not held and session.outgrown.pop() == (("a group", place), held)
    assert turns == ([0, 1, 0, 0] if place is None else [0, 0, 0, 0])
    assert memory.barrier.call_count == (place is None)
    for turn in sorted(set(turns)):
        for sender in (0, 2):
            held.place(turn, 1, sender, like)
    assert {holder for holder, _, _ in written} == {1}
    spans = sorted(span[1:] for span in written)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= made.call_args_list[0].args[0] == len(spans) * 16


def test_what_ends_is_not_taken_for_what_begins():
    """A part of the step on the host may end one and begin another."""
    group = mock.Mock(group_name="a group")
    with (
        mock.patch.object(copy_collectives.compat, "process_group", return_value=group),
        exchange.Session() as session,
    ):
        seen = []
        for _ in range(3):
            copy_collectives.start("gather", "a group", mock.Mock())
            seen.append(copy_collectives.under_way(session))
            copy_collectives.oldest("gather", "a group")
    assert len({tuple(serials) for serials in seen}) == 3 and all(seen)


def test_asked_for():
    names = [p.name for p in configured(copy_engines=True)]
    assert names.index("overlap") < names.index("copy_engines") < names.index("inductor")
    assert "copy_engines" not in [p.name for p in configured()]
    with pytest.raises(ValueError, match=r"^copy_engines=True with passes=exact"):
        configured("exact", copy_engines=True)
