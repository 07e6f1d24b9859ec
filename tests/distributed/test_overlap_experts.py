"""Experts' tokens next to compute: bitwise the step without it, and what runs while they travel."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph import compat
from stepgraph.costs.memory import estimate_memory
from stepgraph.costs.timeline import assumed_timeline
from stepgraph.graph import collectives
from stepgraph.graph.collectives import operator_of
from stepgraph.graph.facts import upstream
from stepgraph.graph.provenance import phase_of, provenance, role_of
from stepgraph.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config, tp_plan
from stepgraph.models.moe import MoEConfig
from stepgraph.parallel import next_token_loss, parallelize
from stepgraph.passes import configured, run_passes
from stepgraph.passes.contract import get
from tests.distributed.ranks import make_mesh, on_ranks, own_batch

TINY = DeepSeekV3Config(
    dim=32, n_layers=2, n_dense_layers=1, n_heads=2, ffn_dim=48, vocab_size=130, max_seq_len=64, q_lora_rank=16,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
    moe=MoEConfig(n_experts=4, top_k=2, ffn_dim=24, n_shared=1, selection_bias=True),
)  # fmt: skip
STEPS = 2


def parallel(mesh, config=TINY, **options):
    torch.manual_seed(0)
    return parallelize(DeepSeekV3(config), mesh, tp_plan(config), **options)


def capture(mesh, model, passes):
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": experts}], lr=0.01, fused=True)
    batch = own_batch(mesh, 0)
    return stepgraph.capture(model, next_token_loss(mesh), batch, optimizer, max_grad_norm=0.5, passes=passes)


def report(step):
    return next(r for r in step.log if r.name == "overlap_experts")


def passes(memory="none", grow=4.0):
    """The exact passes; a model so small is nearly all temporary tensors, of which there may be ``grow`` times more."""
    chosen = configured("exact", memory=memory, cuda_graph=False)
    return [p.with_options(memory=grow) if p.name == "overlap_experts" else p for p in chosen]


def order(step):
    return [node.name for node in step.graph.nodes]


def _check(text, memory):
    mesh = make_mesh(text)
    step = capture(mesh, parallel(mesh, expert_chunks=2), passes(memory))
    assert report(step.graph).changed > 0, report(step.graph).line()
    for i in range(STEPS):
        verified = step.verify(own_batch(mesh, i))  # against the same program run eagerly
        assert verified.bitwise, str(verified)
        step(own_batch(mesh, i))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "world", "memory"),
    [
        ("fsdp=2,ep=2", 2, "full"),
        pytest.param("ep=2,tp=2", 2, "none", marks=pytest.mark.long),
        pytest.param("fsdp=2,tp=2,ep=2", 4, "selective", marks=pytest.mark.long),
    ],
)
def test_bitwise(text, world, memory):
    on_ranks(world, _check, text, memory)


@pytest.fixture(scope="module")
def traced():
    """The step of one of two ranks, before any pass."""
    compat.init_fake_world(0, 2)
    mesh = make_mesh("fsdp=2,ep=2")
    yield capture(mesh, parallel(mesh, expert_chunks=2), []).graph
    dist.destroy_process_group()


def moved(traced, grow):
    module = torch.fx.GraphModule(traced.module, copy.deepcopy(traced.graph))
    step = dataclasses.replace(traced, module=module, executable=None, recording=None, log=[])
    run_passes(step, [get("overlap_experts", memory=grow)])
    return step


def exchanges(step, phase):
    """(where each exchange of rows begins, where it is waited for, its kind), in order."""
    position = {node: i for i, node in enumerate(step.graph.nodes)}
    return [
        (position[node], position[next(iter(node.users))], role_of(node).kind)
        for node in step.graph.nodes
        if (found := operator_of(node)) and found.kind == "all_to_all" and phase_of(node) == phase
        and node.meta["val"].is_floating_point()
    ]  # fmt: skip


def test_what_runs_beside_what(traced):
    """Forward: both dispatches start before a product of experts; backward: both combines do. In between others run."""
    step = moved(traced, 4.0)
    assert [kind for *_, kind in exchanges(traced, "forward")] == ["dispatch"] * 2 + ["combine"] * 2
    for phase, first in (("forward", "dispatch"), ("backward", "combine")):
        before, after = exchanges(traced, phase), exchanges(step, phase)
        assert all(wait == begin + 1 for begin, wait, _ in before)
        assert sum(wait - begin for begin, wait, _ in after) > 50
        (a, a_wait, kind), (b, b_wait, _) = after[:2]
        products = [i for i, n in enumerate(step.graph.nodes)
                    if "grouped_mm" in str(n.target) and phase_of(n) == phase]  # fmt: skip
        assert kind == first and a < b < a_wait and b < products[0] < b_wait
        combine = after[2]
        assert combine[0] < b_wait < combine[1]  # the first half is on its way back when the second is there
    shared = [i for i, n in enumerate(step.graph.nodes) if provenance(n) and provenance(n).path.endswith("shared")]
    assert any(begin < i < wait for begin, wait, _ in exchanges(step, "forward") for i in shared)
    found = report(step)
    assert found.changed > 100 and found.matched == 10
    notes = "\n".join(found.notes)
    assert "dispatch, forward: of " in notes and "combine, backward: of " in notes and "mlp.experts" in notes
    was, now = (assumed_timeline(s.graph) for s in (traced, step))
    waited = [sum(c.exposed_seconds for c in t.collectives if c.role in ("dispatch", "combine")) for t in (was, now)]
    assert waited[1] < waited[0]


def test_norms_during_the_last_reduction(traced):
    """The norms of all gradients except those of the last reduction, mainly the experts', run during it."""
    module = torch.fx.GraphModule(traced.module, copy.deepcopy(traced.graph))
    step = dataclasses.replace(traced, module=module, executable=None, recording=None, log=[])
    *_, found = run_passes(step, [get("bucket_collectives"), get("overlap")])
    wait = max(c.wait for c in collectives.reductions(step))
    norms = [n for n in step.graph.nodes if n.target is torch.ops.aten.linalg_vector_norm.default]
    early = [n for n in norms if n < wait]
    assert early and f"{len(early)} norms of gradients during the last reduction" in found.notes
    assert all(wait in upstream(n) for n in norms[len(early) : -1])  # the last one is of the norms


def test_norms_stay_behind_what_an_optimizer_writes(traced):
    """Such as gradients that it scales in place, or weights that it decays: `torch._foreach_mul_` returns nothing."""
    module = torch.fx.GraphModule(traced.module, copy.deepcopy(traced.graph))
    step = dataclasses.replace(traced, module=module, executable=None, recording=None, log=[])
    norms = [n for n in step.graph.nodes if n.target is torch.ops.aten.linalg_vector_norm.default]
    with step.graph.inserting_before(min(norms)):
        read = [x for n in norms[:-1] for x in n.all_input_nodes]
        scaled = step.graph.call_function(torch.ops.aten._foreach_mul_.Scalar, (read, 0.5))
    scaled.meta = {**norms[0].meta, "val": None}
    run_passes(step, [get("bucket_collectives"), get("overlap")])
    assert scaled < min(norms)


def test_nothing_moves_where_memory_would_grow(traced):
    step = moved(traced, 0.0)
    if estimate_memory(moved(traced, 4.0).graph).peak > estimate_memory(traced.graph).peak:
        assert order(step) == order(traced) and not report(step).changed
        assert "above the 0% that it may grow by: the order stays" in report(step).notes[-1]
    assert estimate_memory(step.graph).peak <= estimate_memory(traced.graph).peak
    with pytest.raises(ValueError, match=r"^overlap_experts memory=-1 is negative; use 0 to allow no growth$"):
        get("overlap_experts", memory=-1)
