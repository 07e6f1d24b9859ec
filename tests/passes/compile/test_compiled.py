"""The passes that prepare a graph for Inductor, run here without it: what they compute must not depend on it."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.graph.facts import tensor_bytes
from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, next_token_loss
from stepgraph.passes import get, run_passes
from stepgraph.passes.memory.recompute import Plan
from stepgraph.passes.memory.rematerialize import rematerialize
from stepgraph.run.cuda_graph import run_watched

CLEAN = ["remove_noop_views", "dedupe_casts", "dead_code"]
EXPAND = replace(
    get("expand_optimizer", small=0), needs_cuda=False
)  # on a GPU it pays; its arithmetic is the same here


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = Llama3Config(64, 2, 4, 2, 128, 320, 64)
    model = Llama3(config)
    model.init_weights(0)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def golf() -> nn.Module:
    model = Golf(GolfConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=320))
    model.init_weights(0)
    return model


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, 320, (4, 32), generator=generator) for key in ("tokens", "targets")}


@pytest.mark.parametrize("build", [llama, golf])
def test_rematerialize_is_bitwise_and_carries_less(build):
    plain, cut = build(), build()
    reference = stepgraph.capture(plain, next_token_loss, batch(), passes=CLEAN)
    step = stepgraph.capture(cut, next_token_loss, batch(), passes=CLEAN)
    again, before, after = rematerialize(step.graph)
    step.graph.graph.lint()
    step.graph.module.recompile()
    assert again > 0 and after < before
    assert torch.equal(reference(batch()), step(batch()))
    for a, b in zip(plain.parameters(), cut.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_rematerialize_computes_only_cheap_operators_again():
    step = trace_step(llama(), next_token_loss, batch()).step
    run_passes(step, CLEAN)
    rematerialize(step)
    again = {str(n.target) for n in step.graph.nodes if n.meta.get("recomputes")}
    assert again and not any(word in name for name in again for word in ("mm", "attention", "mean", "sum"))
    # What backward's matrix products and attention read lies in memory: none of it is a copy.
    for node in step.graph.nodes:
        if node.meta.get("recomputes"):
            readers = [u for u in node.users if not u.meta.get("recomputes")]
            assert not any("mm" in str(u.target) or "attention" in str(u.target) for u in readers)


def test_rematerialize_keeps_what_leaves_a_block():
    """A residual stream in fp32 costs more than the bf16 products that it sums. Yet backward, which needs the last sum
    first, would have to compute all of them again at once."""
    model = llama()

    def autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_loss(model, batch)

    step = trace_step(model, autocast, batch()).step
    run_passes(step, CLEAN)
    before = Plan(step, forward=("forward",))
    streams = {node.name for node in before.candidates() if before.leaves_block(node)}
    assert len(streams) == 2
    again, *_ = rematerialize(step)
    copied = {node.meta["recomputes"] for node in step.graph.nodes if "recomputes" in node.meta}
    assert again and copied and not copied & streams


def test_rematerialize_never_carries_more_than_everything():
    step = trace_step(golf(), next_token_loss, batch()).step
    run_passes(step, CLEAN)
    before = Plan(step, forward=("forward",)).kept_bytes(set())
    _, said_before, after = rematerialize(step)
    carried = {
        root
        for root in Plan(step, forward=("forward",)).kept(set())
    }  # fmt: skip
    assert said_before == before
    assert sum(tensor_bytes(root) for root in carried) == after


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_adamw_is_the_fused_one_up_to_rounding(dtype, maximize):
    """fp32 arithmetic in another order: a few units in the last place of each update over five steps."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        options = {"lr": 1e-2, "weight_decay": 0.1, "maximize": maximize}
        if dtype == torch.bfloat16:
            return stepgraph.MasterAdamW(model.parameters(), **options)
        return torch.optim.AdamW(model.parameters(), **options, fused=True)

    models, states = [llama(dtype), llama(dtype)], []
    for model, passes in zip(models, ([], ["inplace_update", EXPAND]), strict=True):
        update = optimizer(model)
        step = stepgraph.capture(model, next_token_loss, batch(), update, max_grad_norm=1.0, passes=passes)
        for i in range(5):
            step(batch(i % 2))
        states.append([update.state[p] for p in model.parameters()])
    report = step.report[-1]
    assert report.changed == report.matched == sum(1 for _ in models[1].parameters())
    for a, b in zip(*states, strict=True):
        assert torch.equal(a["step"], b["step"]) and a["step"] == 5
        # bf16 gradients are clipped in bf16 by the one and in fp32 by the other.
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(b["exp_avg"], a["exp_avg"], rtol=tolerance, atol=tolerance * 1e-2)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        # An element whose gradient is nearly zero moves by noise over noise: in bf16 on some CPUs by a whole update.
        rtol, atol, few = (1e-5, 5e-6, 0.0) if dtype == torch.float32 else (2e-2, 2e-3, 1e-3)
        apart = (b - a).abs() > atol + rtol * a.abs()
        assert apart.float().mean() <= few and (b - a).abs().max() < 2e-2


def test_expansion_takes_clipping_in_place_with_it():
    """The CUDA form of clipping, ``_foreach_mul_`` on all gradients, written into the graph by hand."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = trace_step(model, next_token_loss, batch(), optimizer).step
    (update,) = [n for n in step.graph.nodes if n.target is torch.ops.aten._fused_adamw_.tensor_lr]
    with step.graph.inserting_before(update):
        scale = step.graph.call_function(torch.ops.aten.full.default, ([], 0.5))
        clip = step.graph.call_function(torch.ops.aten._foreach_mul_.Tensor, (update.args[1], scale))
    for node in (scale, clip):
        node.meta.update(update.meta)
    with update.args[0][0].meta["val"].fake_mode:
        scale.meta["val"] = torch.full([], 0.5)
    run_passes(step, [EXPAND])
    targets = [n.target for n in step.graph.nodes]
    assert torch.ops.aten._foreach_mul_.Tensor not in targets
    assert torch.ops.aten._fused_adamw_.tensor_lr not in targets
    assert len(scale.users) == sum(1 for _ in model.parameters())


def test_nodes_that_wait_for_the_gpu_are_noticed(monkeypatch):
    """torch tells of a synchronization as a warning; here a node warns as it does, on a CPU."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def waits(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return x + 1

    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    second = graph.call_function(waits, (first,))
    graph.output([graph.call_function(torch.neg, (second,))])
    results, waiting = run_watched(fx.GraphModule({}, graph), [torch.ones(2)])
    assert torch.equal(results[0], torch.full((2,), -2.0))
    assert waiting == {second.name}
