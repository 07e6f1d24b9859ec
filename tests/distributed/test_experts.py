"""Expert parallelism: the captured step is bitwise the program run eagerly, and trains as one rank does."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.graph.collectives import operator_of
from stepgraph.graph.provenance import phase_of, role_of
from stepgraph.models import family_of
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import layouts, next_token_loss, parallelize
from stepgraph.parallel.experts import Capacity
from stepgraph.train.checkpoint.checkpointer import Checkpointer
from tests.distributed.expert_model import DIM, HIDDEN, VOCAB, parallel_model, whole_model
from tests.distributed.ranks import make_mesh, on_ranks
from tests.distributed.test_exact import eager_step
from tests.models.moe_models import DEEPSEEK, our_model

BATCH, SEQ, CLIP = 2, 8, 0.5
#: Mesh -> (its ranks, another mesh of them).
MESHES = {
    "fsdp=2,ep=2": (2, "fsdp=2"),
    "ep=2,tp=2": (2, "ep=2"),
    "ddp=2,ep=2": (2, "fsdp=2,ep=2"),
    "fsdp=4,ep=2": (4, "fsdp=4,ep=4"),
    "hsdp=2x2,ep=2": (4, "fsdp=4"),
    "fsdp=2,tp=2,ep=4": (4, "hsdp=2x2,ep=2"),
}


def batch_of(step, dp, place=None):
    """The batch of all data-parallel ranks together, or one rank's part."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (dp * BATCH, SEQ + 1), generator=generator)
    rows = slice(None) if place is None else slice(place * BATCH, (place + 1) * BATCH)
    return {"tokens": tokens[rows, :-1].contiguous(), "targets": tokens[rows, 1:].contiguous()}


def own_batch(mesh, step):
    return batch_of(step, mesh.spec.dp, mesh.dp_place)


def adamw(model):
    """torch's fused update takes tensors of one mesh at a time."""
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    return torch.optim.AdamW([{"params": others}, {"params": experts}], lr=0.01, fused=True)


def assert_same_state(a, b, what=""):
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local()), (what, name)
    for (name, one), other in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(one, other), (what, name)


def check_one_rank(mesh, **options):
    """The losses, gradients and norm of one rank with the whole batch, but for the order of sums (fp32)."""
    alone, model = whole_model(), parallel_model(mesh, **options)
    expected = one_rank_loss(alone, batch_of(0, mesh.spec.dp))
    expected.backward()
    loss = next_token_loss(mesh)(model, own_batch(mesh, 0))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    found = layouts(model)
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        full = lambda stored, name=name: found[name].without_padding(stored).full_tensor()  # noqa: E731
        assert torch.equal(a, full(b.detach())), name
        scale = a.grad.abs().max().item()
        torch.testing.assert_close(full(b.grad), a.grad, rtol=0, atol=2e-6 * scale, msg=name)
    params = list(model.parameters())
    _, norm = gradients.clip({i: p.grad.to_local() for i, p in enumerate(params)}, params, CLIP)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()]))


def check_training(mesh, parts, **options):
    """With all exact passes: loss, norm, parameters and buffers after every update, bit for bit."""
    loss_fn = next_token_loss(mesh)
    eager, captured = parallel_model(mesh, **options), parallel_model(mesh, **options)
    optimizers = adamw(eager), torch.optim.AdamW(captured.parameters(), lr=0.01, fused=True)
    step = stepgraph.capture(
        captured, loss_fn, own_batch(mesh, 0), optimizers[1], max_grad_norm=CLIP, accumulate=parts, passes="exact"
    )
    assert step.verify(own_batch(mesh, 5)).bitwise
    for i in range(2):
        batch = own_batch(mesh, i)
        loss, norm = eager_step(eager, loss_fn, batch, optimizers[0], parts)
        assert torch.equal(step(batch), loss), i
        assert torch.equal(step.metrics["grad_norm"], norm), i
        assert_same_state(eager, captured, i)
        assert step.metrics["repeated"] == 0
    return step


def check_roles(step):
    """Every exchange is for dispatch or combine, forward and backward."""
    found = {}
    for node in step.graph.nodes("forward", "backward"):
        operator = operator_of(node)
        if operator and operator.kind == "all_to_all":
            role = role_of(node)
            assert role.axis == "ep" and not role.parameters and role_of(next(iter(node.users))) == role
            found[phase_of(node), role.kind] = found.get((phase_of(node), role.kind), 0) + 1
    layers = 2
    # Forward dispatch sends the counts, too.
    assert found == {
        ("forward", "dispatch"): 2 * layers,
        ("forward", "combine"): layers,
        ("backward", "combine"): layers,
        ("backward", "dispatch"): layers,
    }


def check_buckets(step, mesh):
    """Experts' weights are gathered and reduced over their own axis, in buckets of their own, one a layer."""
    buckets = {}
    for node in step.graph.nodes("forward", "backward"):
        operator, role = operator_of(node), role_of(node)
        if operator and operator.stage == "begin" and role.kind in ("gather", "reduce"):
            experts = {".experts." in name for name in role.parameters}
            assert len(experts) == 1, node
            if experts == {True}:
                assert role.axis.startswith("ep_"), node
                buckets[role.kind, role.axis] = buckets.get((role.kind, role.axis), 0) + 1
    sizes, expected = mesh.experts.sizes, {}
    if sizes["ep_shard"] > 1:
        expected |= {("gather", "ep_shard"): 2, ("reduce", "ep_shard"): 2}
    if sizes["ep_replicate"] > 1:
        expected["reduce", "ep_replicate"] = 2
    assert buckets == expected


def check_repeated(mesh):
    """Every token to the first two experts, those of one rank: with small buffers the step is repeated, bit for bit as
    with buffers that were large enough from the start."""
    loss_fn = next_token_loss(mesh)
    outcomes = []
    for capacity in (0.3, 64.0):
        torch.manual_seed(7)
        model = parallel_model(mesh, collapsed=True, expert_capacity=capacity).train()
        step = stepgraph.capture(
            model, loss_fn, own_batch(mesh, 0), adamw(model), max_grad_norm=CLIP, accumulate=2, passes="exact"
        )
        losses, repeats = [], []
        for i in range(3):
            losses.append(step(own_batch(mesh, i)))
            repeats.append(int(step.metrics["repeated"]))
        outcomes.append((losses, repeats, model))
    (small, repeats, model), (large, never, other) = outcomes
    assert repeats[0] == 1 and never == [0, 0, 0]
    everywhere = [None] * mesh.spec.size
    dist.all_gather_object(everywhere, (repeats, model.layers[0].moe.exchange.capacity.multiple))
    assert len(set(map(str, everywhere))) == 1, everywhere
    assert all(map(torch.equal, small, large))
    assert_same_state(model, other)


def check_checkpoints(mesh, other, folder):
    """A run resumed from a checkpoint goes on bit for bit, and another mesh reads the same weights and state."""
    loss_fn, runs = next_token_loss(mesh), []
    for resumed in (False, True):
        model = parallel_model(mesh)
        optimizer = adamw(model)
        state = {"model": model, "optimizer": optimizer}
        checkpointer = Checkpointer(folder, mesh=str(mesh.spec))
        if resumed:
            checkpointer.load(folder / "step-00000001", state)
        step = stepgraph.capture(model, loss_fn, own_batch(mesh, 0), optimizer, passes="exact")
        if not resumed:
            step(own_batch(mesh, 0))
            checkpointer.save(1, state)
            saved = whole(model, optimizer)
        runs.append((step(own_batch(mesh, 1)), model))
    assert torch.equal(runs[0][0], runs[1][0])
    for (name, a), b in zip(runs[0][1].named_parameters(), runs[1][1].parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    model = parallel_model(make_mesh(other), collapsed=True)
    optimizer = adamw(model)
    Checkpointer(folder, mesh=other).load(folder / "step-00000001", {"model": model, "optimizer": optimizer}, rng=False)
    for key, value in whole(model, optimizer).items():
        assert torch.equal(value, saved[key]), key


def whole(model, optimizer):
    """Every parameter and first moment, whole."""
    found, places = {}, layouts(model)
    for name, param in model.named_parameters():
        for key, stored in (("", param.detach()), (".exp_avg", optimizer.state[param]["exp_avg"])):
            found[name + key] = places[name].without_padding(stored).full_tensor().clone()
    return found


def check_deepseek(mesh):
    """The models' own layers: with load counted in backward and biases moved once a step, as one rank does it."""
    config = dataclasses.replace(DEEPSEEK, n_layers=2, vocab_size=VOCAB)
    alone, eager, captured = our_model(config), our_model(config), our_model(config)
    for model in (eager, captured):
        parallelize(model, mesh, family_of(config).tp_plan(config))
    loss_fn, optimizers = next_token_loss(mesh), [adamw(model) for model in (eager, captured)]
    step = stepgraph.capture(
        captured, loss_fn, own_batch(mesh, 0), optimizers[1], max_grad_norm=CLIP, accumulate=2, passes="exact"
    )
    for i in range(2):
        loss, _ = eager_step(eager, loss_fn, own_batch(mesh, i), optimizers[0], 2)
        load = stepgraph.end_of_step(eager)["expert_load"]
        assert torch.equal(step(own_batch(mesh, i)), loss)
        assert torch.equal(step.metrics["expert_load"], load)
        assert_same_state(eager, captured, i)
        if i == 0:
            expected = one_rank_loss(alone, batch_of(0, mesh.spec.dp))
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
            torch.testing.assert_close(load, stepgraph.end_of_step(alone)["expert_load"], rtol=0, atol=0)
            buffers = dict(captured.named_buffers())  # and the rank's place, with tp
            for name, value in alone.named_buffers():
                assert torch.equal(value, buffers[name]), name


def _check(text):
    mesh = make_mesh(text)
    check_one_rank(mesh)
    step = check_training(mesh, 1)
    check_roles(step)
    check_buckets(step, mesh)
    check_repeated(mesh)


def _check_more(text, other, folder):
    _check(text)
    mesh = make_mesh(text)
    check_training(mesh, 2, param_dtype=torch.bfloat16)
    check_checkpoints(mesh, other, Path(folder))
    check_deepseek(mesh)


def test_two_ranks():
    on_ranks(2, _check, "fsdp=2,ep=2")


@pytest.mark.long
@pytest.mark.parametrize("text", MESHES)
def test_mesh(text, tmp_path):
    world, other = MESHES[text]
    on_ranks(world, _check_more, text, other, str(tmp_path))


@pytest.fixture
def world():
    compat.init_fake_world(5, 8)
    yield
    dist.destroy_process_group()


def test_experts_are_split_first_then_their_weights(world):
    mesh = make_mesh("hsdp=2x2,tp=2,ep=2")
    axes = mesh.experts
    assert axes.sizes == {"ep_replicate": 2, "ep_shard": 2, "ep": 2} and axes.names == (
        "ep",
        "ep_shard",
        "ep_replicate",
    )
    assert axes.axis("ep").mesh.tolist() == [4, 5] and axes.axis("ep_shard").mesh.tolist() == [5, 7]
    assert axes.divisor == mesh.spec.dp == 4
    found = layouts(parallel_model(mesh))
    assert found["layers.0.moe.experts.up"].region == ((2, 3), (0, HIDDEN), (0, DIM))  # 4 experts: 2, then 1 of them
    assert found["layers.0.moe.router.weight"].mesh is mesh
    # One expert a rank: FSDP splits the next dimension.
    alone = layouts(parallel_model(make_mesh("fsdp=8,ep=4")))["layers.0.moe.experts.up"]
    assert alone.region == ((1, 2), (HIDDEN // 2, HIDDEN), (0, DIM)) and alone.shard_dim == 1 and not alone.padded


def test_what_does_not_fit_is_refused(world):
    with pytest.raises(ValueError, match=r"^ep=8 does not divide layers.0.moe.n_experts=4; try ep=4$"):
        parallel_model(make_mesh("fsdp=8,ep=8"))
    with pytest.raises(ValueError, match=r"^mesh fsdp=8,ep=2 has ep and the model has no layer of experts; drop"):
        parallelize(nn.Linear(4, 4), make_mesh("fsdp=8,ep=2"))
    with pytest.raises(ValueError, match=r"^expert_capacity=0 must be above 0"):
        parallel_model(make_mesh("fsdp=8,ep=2"), expert_capacity=0)
    model = whole_model()
    model.layers[1].moe.experts.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(
        ValueError, match=r"^layers.1.moe.experts.scale has shape \[3\]; an expert layer's .* need 4 rows"
    ):
        parallelize(model, make_mesh("fsdp=8,ep=2"))


@given(
    multiple=st.floats(0.1, 16), tokens=st.integers(1, 64), slots=st.integers(1, 8), here=st.integers(1, 8),
    ranks=st.integers(1, 8), level=st.floats(1.0, 100),
)  # fmt: skip
def test_capacity_grows_until_all_fits(multiple, tokens, slots, here, ranks, level):
    capacity = Capacity(multiple)
    room, most = capacity.rows(tokens, slots, here, ranks), tokens * min(slots, here)
    assert 0 < room <= most
    needed = min(math.floor(level * room), most)
    found = capacity.ratio(torch.tensor(needed), tokens, slots, here, ranks)
    assert found.dtype == torch.float64 and (found > 1) == (needed > room)
    for larger in (False, True):  # a validation in between may have found out first
        capacity.multiple = 2 * multiple if larger and needed > room else capacity.multiple
        capacity.grow(multiple, found.item())
        assert capacity.rows(tokens, slots, here, ranks) >= needed
        assert capacity.multiple in {multiple * 2**k for k in range(9)}
        assert capacity.multiple <= multiple * max(1, 2 * found.item())
