"""The captured graph of a parallel model: bitwise the same program run eagerly, and the same training as one rank's."""

import dataclasses

import pytest
import torch

import stepgraph
from stepgraph.capture import gradients
from stepgraph.graph.collectives import ALL_GATHER
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.provenance import provenance
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import layouts, next_token_loss
from stepgraph.passes import StepOptions, configured
from stepgraph.passes.memory.recompute import Plan
from tests.distributed.ranks import (
    TINY,
    full,
    global_batch,
    make_mesh,
    on_ranks,
    own_batch,
    parallel_model,
    whole_model,
)

MESHES = {"fsdp=2": 2, "tp=2": 2, "fsdp=2,tp=2": 4, "hsdp=2x2": 4}
LAYERS = dataclasses.replace(TINY, n_layers=2)
STEPS, CLIP = 2, 0.5
BUCKETS = ("bucket_collectives",)  # left out where single collectives are counted
PARTS = 2  # microbatches of a step


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def eager_step(model, loss_fn, batch, optimizer, parts=PARTS):
    """Microbatches forward and backward, clipping over the mesh, and the update, without a graph."""
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


def check_gradients(mesh, **options):
    """Loss and gradients: graph and eager program agree bit for bit."""
    loss_fn, batch = next_token_loss(mesh), own_batch(mesh, 0)
    eager, captured = parallel_model(mesh, **options), parallel_model(mesh, **options)
    loss = loss_fn(eager, batch)
    loss.backward()
    step = stepgraph.capture(captured, loss_fn, batch, passes="exact")
    assert torch.equal(step(batch), loss)
    for (name, a), b in zip(eager.named_parameters(), captured.parameters(), strict=True):
        assert a.grad.placements == b.grad.placements == a.placements, name
        assert torch.equal(a.grad.to_local(), b.grad.to_local()), name


def check_training(mesh, **options):
    """Loss, the norm of all gradients, and the parameters after every update: they agree bit for bit."""
    loss_fn = next_token_loss(mesh)
    eager, captured = parallel_model(mesh, **options), parallel_model(mesh, **options)
    optimizers = adamw(eager), adamw(captured)
    step = stepgraph.capture(
        captured,
        loss_fn,
        own_batch(mesh, 0),
        optimizers[1],
        max_grad_norm=CLIP,
        accumulate=PARTS,
        passes="exact",
        disable=BUCKETS,
    )
    for i in range(STEPS):
        batch = own_batch(mesh, i)
        loss, norm = eager_step(eager, loss_fn, batch, optimizers[0])
        assert torch.equal(step(batch), loss), i
        assert torch.equal(step.metrics["grad_norm"], norm), i
        for (name, a), b in zip(eager.named_parameters(), captured.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), (i, name)


def check_recomputed(mesh):
    """Full recomputation gathers the sequence again in backward, with the same bits, and keeps parts of it only."""
    loss_fn, batch = next_token_loss(mesh), own_batch(mesh, 0)
    eager = parallel_model(mesh, LAYERS)
    loss = loss_fn(eager, batch)
    loss.backward()
    steps = {}
    for memory in ("none", "selective", "full"):
        captured = parallel_model(mesh, LAYERS)
        passes = configured("exact", memory=memory)
        step = steps[memory] = stepgraph.capture(captured, loss_fn, batch, passes=passes, disable=BUCKETS)
        assert torch.equal(step(batch), loss), memory
        for (name, a), b in zip(eager.named_parameters(), captured.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), (memory, name)

    def again(step):
        return [n for n in step.graph.nodes("backward") if n.target is ALL_GATHER and "recomputes" in n.meta]

    assert again(steps["none"]) == again(steps["selective"]) == []
    assert len(again(steps["full"])) == 2 * LAYERS.n_layers  # before attention and before the feed-forward
    whole = batch["tokens"].numel() * LAYERS.dim * 4
    kept = {
        memory: sum(tensor_bytes(n) == whole for n in Plan(step.graph).saved if provenance(n).path.startswith("layers"))
        for memory, step in steps.items()
    }
    assert kept["full"] == 0 < kept["selective"] <= kept["none"]


def check_one_rank(mesh, **options):
    """The same losses, gradients and norm as one rank with the whole batch, but for the order of sums (fp32)."""
    loss_fn = next_token_loss(mesh)
    alone, model = whole_model(), parallel_model(mesh, **options)
    expected = one_rank_loss(alone, global_batch(0, mesh.spec.dp))
    expected.backward()
    loss = loss_fn(model, own_batch(mesh, 0))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, full(model, name, b.detach())), name
        scale = a.grad.abs().max().item()
        torch.testing.assert_close(full(model, name, b.grad), a.grad, rtol=0, atol=2e-6 * scale, msg=name)
    params = list(model.parameters())
    _, norm = gradients.clip({i: p.grad.to_local() for i, p in enumerate(params)}, params, CLIP)
    expected = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def check_collectives(mesh, **options):
    """How many collectives there are of each kind, and that every one knows its module, phase and source line."""
    model = parallel_model(mesh, **options)
    step = stepgraph.capture(
        model,
        next_token_loss(mesh),
        own_batch(mesh, 0),
        adamw(model),
        max_grad_norm=CLIP,
        passes="exact",
        disable=BUCKETS,
    )
    nodes = [n for n in step.graph.nodes() if "_c10d_functional" in str(n.target)]
    for node in nodes:
        found = provenance(node)
        assert found and found.phase in ("forward", "loss", "backward", "optimizer"), node
        assert found.phase in ("loss", "optimizer") or found.path, node
        assert found.source, node

    def count(kind, phase):
        return sum(kind in str(n.target) and provenance(n).phase == phase for n in nodes)

    params, norms = 3 + 9 * TINY.n_layers, 1 + 2 * TINY.n_layers
    sharded, tp, replicas = mesh.spec.dp_shard > 1, mesh.spec.tp > 1, mesh.spec.dp_replicate > 1
    gathers, scatters = norms, 1 + 2 * TINY.n_layers  # of the sequence, under tp
    assert count("all_gather", "forward") == params * sharded + gathers * tp
    assert count("all_gather", "backward") == scatters * tp
    assert count("reduce_scatter", "forward") == scatters * tp
    assert count("reduce_scatter", "backward") == params * sharded + gathers * tp
    assert count("all_reduce", "backward") == norms * tp + params * replicas
    assert count("all_reduce", "loss") == 1 + 2 * tp
    assert count("all_reduce", "optimizer") == 1
    if sharded:  # FSDP's gathers belong to the modules that own the parameters
        gathered = [n for n in nodes if "all_gather" in str(n.target) and provenance(n).phase == "forward"]
        owners = {name.rpartition(".")[0] for name, _ in whole_model().named_parameters()}
        assert owners <= {provenance(n).path for n in gathered}


def _check(text):
    mesh = make_mesh(text)
    check_one_rank(mesh)
    check_gradients(mesh)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16 if mesh.spec.tp > 1 else torch.float32}
    check_training(mesh, **dtypes)
    check_collectives(mesh, **dtypes)


def _check_recomputed():
    check_recomputed(make_mesh("tp=2"))


def test_full_recomputation_gathers_again():
    on_ranks(2, _check_recomputed)


@pytest.mark.slow
# fsdp=2 also trains bitwise in tests of overlap, optimizers and `verify`, tp=2 above, and both in tests of faults.
@pytest.mark.parametrize("text", [pytest.param(m, marks=[pytest.mark.long] * (MESHES[m] == 2)) for m in MESHES])
def test_mesh(text):
    on_ranks(MESHES[text], _check, text)


def _check_columns():
    """Three ranks split the four rows of keys and values by columns, of which the last rank has fewer."""
    config = dataclasses.replace(TINY, dim=16, n_kv_heads=1)
    mesh = make_mesh("fsdp=3")
    columns = {name for name, found in layouts(parallel_model(mesh, config)).items() if found.shard_dim == 1}
    assert columns == {"layers.0.attn.k_proj.weight", "layers.0.attn.v_proj.weight"}
    check_training(mesh, config=config)
    # Buckets, gathers again in backward and prefetching, whose sums are those of the same collectives.
    loss_fn, batch = next_token_loss(mesh), own_batch(mesh, 0)
    right, model = parallel_model(mesh, config), parallel_model(mesh, config)
    loss_fn(right, batch).backward()
    options = StepOptions(reshard="always", inductor="off")
    stepgraph.capture(model, loss_fn, batch, passes=options)(batch)
    for a, b in zip(right.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local())


@pytest.mark.slow
def test_parameters_split_by_columns():
    on_ranks(3, _check_columns)
