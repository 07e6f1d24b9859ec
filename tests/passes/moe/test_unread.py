"""Rows that no token fills are left unwritten where nothing reads them: filled with NaN, no result is another one."""

import pytest
import torch

import stepgraph
from stepgraph.graph.facts import leaves_rest
from stepgraph.models import family_of
from stepgraph.parallel import next_token_loss, parallelize
from stepgraph.passes import StepOptions, chosen, configured, get
from tests.distributed.ranks import make_mesh, on_ranks
from tests.distributed.test_experts import adamw, assert_same_state, own_batch
from tests.models.moe_models import our_model
from tests.passes.moe.test_swiglu import (
    CONFIG,
    LAYERS,
    Experts,
    batch_by_hand,
    by_chunks,
    loss_fn,
    product_returned,
    report_of,
    returned,
    with_swiglu,
)

ours = torch.ops.stepgraph


def unwritten(step):
    """Name of an operator -> how many of its results have rows of anything."""
    found = {}
    for node in step.graph.graph.nodes:
        if leaves_rest(node):
            name = str(node.target).split(".")[1]
            found[name] = found.get(name, 0) + 1
    return found


def trained(mesh, passes, exchange, chunks):
    model = our_model(CONFIG)
    parallelize(model, mesh, family_of(CONFIG).tp_plan(CONFIG), expert_exchange=exchange, expert_chunks=chunks)
    step = stepgraph.capture(model, next_token_loss(mesh), own_batch(mesh, 0), adamw(model), passes=passes)
    return [step(own_batch(mesh, i)) for i in range(2)], model, step


def check_ranks(exchange, chunks, memory, expected):
    """What nothing writes is NaN, in the second run, and every bit of losses and parameters is that of the first."""
    mesh = make_mesh("fsdp=2,ep=2")
    passes = with_swiglu(configured("exact", memory=memory, cuda_graph=False))
    losses, model, before = trained(mesh, [p for p in passes if p.name != "unread_rows"], exchange, chunks)
    torch.use_deterministic_algorithms(True)  # what torch leaves uninitialized is NaN
    assert torch.empty(3).isnan().all()
    found, other, step = trained(mesh, passes, exchange, chunks)
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, losses, found))
    assert_same_state(model, other)
    # Recomputation comes later, and repeats operators as they are.
    n, counts = LAYERS * chunks, unwritten(step)
    assert not unwritten(before) and report_of(step, "unread_rows").changed == n * sum(expected.values())
    for name, times in expected.items():
        assert counts[name] == n * times if memory == "none" else counts[name] >= n * times, counts


ALL = {"grouped_mm": 4, "swiglu_rows": 1, "swiglu_rows_backward": 1, "rows_end": 2}
PADDED = {"grouped_mm": 2, "swiglu_rows": 1, "swiglu_rows_backward": 1}


def _check_ranks():
    check_ranks("symmetric", 2, "none", ALL)
    check_ranks("collectives", 1, "none", PADDED)


def test_two_ranks():
    on_ranks(2, _check_ranks)


def _check_recomputed():
    check_ranks("symmetric", 1, "full", ALL)


@pytest.mark.long
def test_two_ranks_that_recompute():
    on_ranks(2, _check_recomputed)


# Models by hand


def check(model, names=("expert_swiglu", "unread_rows")):
    batch = batch_by_hand()
    step = stepgraph.capture(model, loss_fn, batch, passes=with_swiglu([get(name) for name in names]))
    torch.use_deterministic_algorithms(True)
    try:
        loss = step(batch)
    finally:
        torch.use_deterministic_algorithms(False)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = loss_fn(model, batch)
    expected.backward()
    assert torch.equal(loss, expected.detach()) and all(
        torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True)
    )
    return step


def test_what_is_returned_keeps_its_zeros():
    """The last product's rows are the model's result, whose mean counts the zeros; what is within is not seen."""
    step = check(Experts(by_chunks))
    report = report_of(step, "unread_rows")
    assert unwritten(step) == {"grouped_mm": 2, "swiglu_rows": 1, "swiglu_rows_backward": 1}
    assert report.summary == "4 of 5 buffers of expert rows left unzeroed where nothing reads them"


@pytest.mark.parametrize("gated", [returned, product_returned])
def test_other_readers_keep_the_zeros(gated):
    """SwiGLU, or gate and up, are a result too; by torch's operators they are computed for all rows."""
    assert not unwritten(check(Experts(gated)))


def test_other_offsets_keep_the_zeros():
    """Rows between the two ends are read."""
    step = check(Experts(by_chunks, offsets=1))
    assert all(str(n.target).startswith("stepgraph.grouped_mm") for n in step.graph.graph.nodes if leaves_rest(n))
    first, *_ = step.graph.graph.find_nodes(op="call_function", target=ours.grouped_mm.default)
    assert not leaves_rest(first)


def test_its_place():
    for passes in ("default", "exact"):
        names = [p.name for p in chosen(StepOptions(passes))]
        assert names.index("unread_rows") < names.index("recompute")
    assert get("unread_rows").tier == "exact"
