"""Products in a pipeline with collectives: the operators, and training with the pass on gloo ranks."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.capture import phase_of
from stepgraph.graph import collectives
from stepgraph.kernels.comm.async_matmul import all_gather_matmul, matmul_reduce_scatter
from stepgraph.parallel import next_token_loss
from stepgraph.passes import configured
from stepgraph.passes.contract import get
from tests.distributed.ranks import TINY, in_fake_world, make_mesh, on_ranks, own_batch, parallel_model

JOIN = get("async_tensor_parallel", unprofitable=True)
BEFORE = ["fold_constants", "remove_noop_views", "dedupe_casts", "dead_code", "inplace_update", "bucket_collectives"]
STEPS, LAYERS = 2, 2


def _check_operators(batch):
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(batch, ranks * 3, 5, dtype=torch.float64)
    weights = [torch.randn(5, n, dtype=torch.float64) for n in (4, 6)]
    for keep in (True, False):
        *gathered, one, two = all_gather_matmul(x.chunk(ranks, 1)[rank], weights, keep, group)
        assert len(gathered) == keep and all(torch.equal(g, x) for g in gathered)
        torch.testing.assert_close(one, (x @ weights[0]).flatten(0, 1))
        torch.testing.assert_close(two, (x @ weights[1]).flatten(0, 1))
    lefts = torch.randn(2, ranks, batch * ranks * 3, 5, dtype=torch.float64)
    rights = torch.randn(2, ranks, 5, 7, dtype=torch.float64)
    part = matmul_reduce_scatter(list(lefts[:, rank]), list(rights[:, rank]), batch, group)
    expected = (lefts @ rights).sum((0, 1)).view(batch, ranks * 3, 7)
    torch.testing.assert_close(part, expected.chunk(ranks, 1)[rank])


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_operators(ranks):
    """Against the whole products in float64, where only the order of sums is left to differ."""
    on_ranks(ranks, _check_operators, 2)


def capture(mesh, chosen, batch=2, optimize=True, accumulate=1):
    model = parallel_model(mesh, dataclasses.replace(TINY, n_layers=LAYERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) if optimize else None
    step = stepgraph.capture(
        model,
        next_token_loss(mesh),
        own_batch(mesh, 0, batch),
        optimizer,
        max_grad_norm=0.5 if optimize else None,
        accumulate=accumulate,
        passes=chosen,
    )
    return model, step


def close(a, b, rtol):
    """Equal but for ``rtol`` of the largest element."""
    torch.testing.assert_close(a, b, rtol=0, atol=rtol * b.abs().max().item())


def counts(graph):
    names = {collectives.ALL_GATHER_MATMUL: "gather", collectives.MATMUL_REDUCE_SCATTER: "scatter"}
    return Counter((names[n.target], phase_of(n)) for n in graph.nodes if n.target in names)


#: Of each block: before q, k, v and before gate and up; behind o and down; backward the other way round. And the head.
JOINED = {
    ("gather", "forward"): 2 * LAYERS + 1,
    ("scatter", "forward"): 2 * LAYERS,
    ("gather", "backward"): 2 * LAYERS,
    ("scatter", "backward"): 2 * LAYERS + 1,
}


def _check_training(text, batch):
    """fp32. A chunk's product may be summed in another order than the whole one's, each sum of products and of ranks
    too: some 2^-24 of the largest term each. Gradients see a few dozen such sums: 2e-6, as against one rank. AdamW
    divides by what it multiplies, so that an update differs by a share of the learning rate where gradients are
    near nothing; the loss hardly sees it."""
    mesh = make_mesh(text)
    resharded = [*BEFORE[:-1], "reshard_after_forward", BEFORE[-1]]
    for optimize, passes in ((False, BEFORE), (True, resharded)):
        plain, step = capture(mesh, BEFORE, batch, optimize)
        changed, joined = capture(mesh, [*passes, "overlap", JOIN], batch, optimize)
        assert counts(joined.graph.graph) == JOINED
        for i in range(STEPS if optimize else 1):
            data = own_batch(mesh, i, batch)
            torch.testing.assert_close(joined(data), step(data), rtol=2e-6, atol=0)
            if optimize:
                torch.testing.assert_close(joined.metrics["grad_norm"], step.metrics["grad_norm"], rtol=1e-5, atol=0)
        for (name, a), b in zip(plain.named_parameters(), changed.parameters(), strict=True):
            if optimize:
                assert (a.to_local() - b.to_local()).abs().mean() < 1e-5, name  # three updates of 1e-2
            else:
                close(b.grad.to_local(), a.grad.to_local(), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "ranks", "batch"), [("tp=2", 2, 1), pytest.param("fsdp=2,tp=2", 4, 2, marks=pytest.mark.long)]
)
def test_training(text, ranks, batch):
    on_ranks(ranks, _check_training, text, batch)


def report(step):
    return next(r for r in step.graph.log if r.name == "async_tensor_parallel")


def _joined(batch):
    """Every product between a gather or a reduce-scatter of activations, with one sequence and with several."""
    _, step = capture(make_mesh("fsdp=2,tp=2"), [*BEFORE, "overlap", JOIN], batch)
    assert counts(step.graph.graph) == JOINED
    found = report(step)
    assert found.matched == found.changed + 2 == sum(JOINED.values()) + 2
    text = "\n".join(found.notes)
    assert f"forward, all_gather_into_tensor with 3 products: {LAYERS}, " in text
    assert f"backward, reduce_scatter_tensor with 3 products: {LAYERS}, " in text
    assert "left unchanged, forward, reduce_scatter_tensor: not of products alone (1)" in text  # the embedding
    assert "left unchanged, backward, all_gather_into_tensor: feeds no product (1)" in text
    assert "exposed communication" in text


def _accumulation():
    _, step = capture(make_mesh("fsdp=2,tp=2"), [*BEFORE, "overlap", JOIN], 4, accumulate=2)
    assert counts(step.graph.graph) == JOINED


def _too_small():
    """The forecast leaves alone what copies and barriers would make slower."""
    _, step = capture(make_mesh("fsdp=2,tp=2"), [*BEFORE, get(JOIN.name)])
    assert report(step).changed == 0
    assert any("too small for a pipeline to pay" in note for note in report(step).notes)


def _two_machines():
    chosen = [*BEFORE, get(JOIN.name, ranks_per_machine=1)]
    _, step = capture(make_mesh("fsdp=2,tp=2"), chosen)
    assert report(step).changed == 0
    assert any("its ranks do not share a machine" in note for note in report(step).notes)


def test_asked_for():
    assert "async_tensor_parallel" not in [p.name for p in configured()]
    names = [p.name for p in configured(async_tp=True)]
    assert names.index("overlap") < names.index("async_tensor_parallel") < names.index("inductor")
    with pytest.raises(ValueError, match=r"^async_tp=True with passes=exact"):
        configured("exact", async_tp=True)


def _nothing_found():
    step = stepgraph.capture(torch.nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.ones(2, 4), passes=[JOIN])
    assert "found nothing to do" in report(step).line()


def _joined_and_left():
    for batch in (1, 2):
        _joined(batch)
    for check in (_accumulation, _too_small, _two_machines, _nothing_found):
        check()


def test_what_is_joined_and_what_is_left():
    in_fake_world(0, 4, _joined_and_left)
