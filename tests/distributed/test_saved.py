"""Saved steps on ranks: those of one graph share what the first makes, and pipelines are saved graph by graph."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import next_token_loss, parallelize
from tests.distributed.expert_model import parallel_model
from tests.distributed.ranks import TINY, make_mesh, on_ranks, own_batch, whole_model
from tests.distributed.test_experts import own_batch as expert_batch_of
from tests.distributed.test_pipeline import DEEP, pipelined


def a_batch(mesh, seed):
    """In storage of its own: where a view of a larger one begins differs from rank to rank, and so do graphs."""
    return {key: value.clone() for key, value in own_batch(mesh, seed).items()}


def expert_batch(mesh, seed):
    return {key: value.clone() for key, value in expert_batch_of(mesh, seed).items()}


def steps_of(step, mesh, model, n=2):
    found = [step(a_batch(mesh, seed)) for seed in range(n)]
    params = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    return found + [p.clone() for p in params if not p.is_meta]


def compared(build, mesh, folder, plain, **options):
    """Of starts that are compared, the one that made the step and the one that loaded it; with ``plain`` there is one
    without a folder too."""
    found = []
    for saved in [None] * plain + [folder, folder]:
        model = build()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if not p.is_meta], lr=0.01)
        step = stepgraph.capture(
            model, next_token_loss(mesh), a_batch(mesh, 0), optimizer,
            max_grad_norm=0.5, passes="exact", saved=saved, **options,
        )  # fmt: skip
        found.append((step.saved, steps_of(step, mesh, model)))
    (_, expected), *others = found
    for _, results in others:
        assert len(results) == len(expected) and all(map(torch.equal, expected, results))
    return found[-2][0], found[-1][0]


def check_shared(folder, long):
    mesh = make_mesh("fsdp=2")

    def sharded():
        model = whole_model()
        parallelize(model, mesh, TP_PLAN)
        return model

    check_experts(make_mesh("fsdp=2,ep=2"), folder / "experts")
    made, loaded = compared(sharded, mesh, folder, long)
    assert loaded.loaded and made.kept
    if dist.get_rank():
        assert made.loaded and made.notes == ["rank 0, which has the same graph, made the step"], made
    else:
        assert not made.loaded and not made.notes
    check_dumped(sharded(), mesh, folder)
    config = DEEP if long else dataclasses.replace(TINY, n_layers=2, tie_embeddings=True)
    check_pipeline(make_mesh("pp=2"), folder, config, long)


def check_dumped(model, mesh, folder):
    """Where one rank dumps its graphs, as the trainer's first does, none takes saved steps: they would wait for it."""
    dump, saved = None if dist.get_rank() else folder / "graphs", folder / "unused"
    batch, loss_fn = a_batch(mesh, 0), next_token_loss(mesh)
    step = stepgraph.capture(model, loss_fn, batch, passes=["dead_code"], saved=saved, dump=dump)
    assert not step.saves and not saved.exists()
    assert dump is None or any(dump.iterdir())


def experts(mesh, saved, capacity):
    """(how the step came about at first, how in the end, everything that two steps leave, the capacity in the end):
    every token chooses the same experts, so that a small ``capacity`` must grow."""
    model = parallel_model(mesh, collapsed=True, expert_capacity=capacity)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = [expert_batch(mesh, i) for i in range(2)]
    step = stepgraph.capture(
        model, next_token_loss(mesh), batches[0], optimizer, max_grad_norm=0.5, passes="exact", saved=saved
    )
    first, left = step.saved, []
    for batch in batches:
        left += [step(batch), *step.metrics.values()]
    left += [t.to_local() if hasattr(t, "to_local") else t for t in (*model.parameters(), *model.buffers())]
    return first, step.saved, [t.detach().clone() for t in left], model.layers[0].moe.exchange.capacity.multiple


def check_experts(mesh, folder):
    """A step that was too small is loaded, found too small and repeated with a larger one, which is loaded too."""
    _, _, expected, grown = experts(mesh, None, 0.5)
    assert grown > 0.5
    made, repaired, first, _ = experts(mesh, folder, 0.5)
    assert made.kept and repaired.kept and made.kept != repaired.kept
    loaded, larger, second, _ = experts(mesh, folder, 0.5)
    assert loaded.loaded and larger.loaded, (loaded, larger)
    assert all(map(torch.equal, expected, first)) and all(map(torch.equal, expected, second))
    assert len(expected) == len(first) == len(second)
    other, _, _, _ = experts(mesh, folder, 0.75)
    if not dist.get_rank():  # the others load what this rank makes
        assert not repaired.loaded and not other.loaded and "differs in graph" in other.notes[0], other


def check_pipeline(mesh, folder, config, plain):
    model, _ = pipelined(mesh, "1f1b", config, sends="symmetric" if plain else "point-to-point")
    made, loaded = compared(lambda: copy.deepcopy(model), mesh, folder, plain, accumulate=2)
    assert made.kept and loaded.loaded, loaded


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ranks_share_steps_and_pipelines_are_saved_graph_by_graph(long, tmp_path):
    on_ranks(2, check_shared, tmp_path, long)
