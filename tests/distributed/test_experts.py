"""Expert parallelism: the captured step is bitwise the program run eagerly, and trains as one rank does."""

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.capture import gradients
from stepgraph.graph.collectives import operator_of
from stepgraph.graph.provenance import phase_of, role_of
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import layouts, next_token_loss
from tests.distributed.expert_model import VOCAB, parallel_model, whole_model
from tests.distributed.ranks import make_mesh, on_ranks

BATCH, SEQ, CLIP = 2, 8, 0.5
MESHES = {
    "fsdp=4,ep=2": 4,
    "ep=2,tp=2": 2,
    "hsdp=2x2,ep=2": 4,
    "fsdp=2,tp=2,ep=4": 4,
    "ddp=2,ep=2": 2,
    "fsdp=4,ep=4": 4,
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


def eager_step(model, loss_fn, batch, optimizer, parts):
    total = 0
    for part in range(parts):
        loss = loss_fn(model, {key: value.chunk(parts)[part] for key, value in batch.items()}) / parts
        loss.backward()
        total = total + loss.detach()
    params = list(model.parameters())
    clipped, norm = gradients.clip({i: p.grad.to_local() for i, p in enumerate(params)}, params, CLIP)
    for i, param in enumerate(params):
        param.grad.to_local().copy_(clipped[i])
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


def assert_same_state(a, b, what=""):
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local()), (what, name)
    for (name, one), other in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(one, other), (what, name)


def check_one_rank(mesh):
    """The losses, gradients and norm of one rank with the whole batch, but for the order of sums (fp32)."""
    alone, model = whole_model(), parallel_model(mesh)
    expected = one_rank_loss(alone, batch_of(0, mesh.spec.dp))
    expected.backward()
    loss = next_token_loss(mesh)(model, own_batch(mesh, 0))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    found = layouts(model)
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        whole = lambda stored, name=name: found[name].without_padding(stored).full_tensor()  # noqa: E731
        assert torch.equal(a, whole(b.detach())), name
        scale = a.grad.abs().max().item()
        torch.testing.assert_close(whole(b.grad), a.grad, rtol=0, atol=2e-6 * scale, msg=name)
    params = list(model.parameters())
    _, norm = gradients.clip({i: p.grad.to_local() for i, p in enumerate(params)}, params, CLIP)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()]))


def check_training(mesh, parts, **options):
    """With all exact passes: loss, norm, parameters and buffers after every update, bit for bit."""
    loss_fn = next_token_loss(mesh)
    eager, captured = parallel_model(mesh, **options), parallel_model(mesh, **options)
    optimizers = adamw(eager), adamw(captured)
    step = stepgraph.capture(
        captured, loss_fn, own_batch(mesh, 0), optimizers[1], max_grad_norm=CLIP, accumulate=parts, passes="exact"
    )
    for i in range(2):
        batch = own_batch(mesh, i)
        loss, norm = eager_step(eager, loss_fn, batch, optimizers[0], parts)
        assert torch.equal(step(batch), loss), i
        assert torch.equal(step.metrics["grad_norm"], norm), i
        assert_same_state(eager, captured, i)
        assert step.metrics["repeated"] == 0
    return step


def check_roles(step):
    """Every exchange is for dispatch or combine, forward and backward; experts' weights are gathered over their axis."""
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
    axes = {
        role.axis for n in step.graph.nodes() if (role := role_of(n)) and any(".experts." in p for p in role.parameters)
    }
    mesh = step.graph.mesh
    return axes, mesh


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


def _check(text):
    mesh = make_mesh(text)
    check_one_rank(mesh)
    step = check_training(mesh, 1)
    check_training(mesh, 2, param_dtype=torch.bfloat16)
    check_roles(step)
    check_repeated(mesh)


@pytest.mark.parametrize("text", ["fsdp=2,ep=2", *(pytest.param(text, marks=pytest.mark.long) for text in MESHES)])
def test_mesh(text):
    on_ranks(MESHES.get(text, 2), _check, text)
