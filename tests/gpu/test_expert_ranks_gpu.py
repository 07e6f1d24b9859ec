"""Experts over GPUs, with NCCL: one CUDA graph a step, repeated with larger buffers where routing needs them."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture import guard as conditions
from stepgraph.models import DeepSeekV3, DeepSeekV3Config, MoEConfig, family_of
from stepgraph.parallel import local_parts, next_token_loss, parallelize
from stepgraph.parallel.expert_symmetric import SymmetricExchange
from stepgraph.parallel.experts import Capacity, ExpertExchange
from stepgraph.passes import configured
from tests.gpu.test_ranks_gpu import on_gpus, on_one_gpu

CONFIG = DeepSeekV3Config(
    dim=256,
    n_layers=3,
    n_dense_layers=1,
    n_heads=8,
    ffn_dim=512,
    moe=MoEConfig(n_experts=8, top_k=2, ffn_dim=128, n_shared=1, scoring="sigmoid", selection_bias=True),
    vocab_size=1024,
    max_seq_len=512,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
MESHES = {"fsdp=2,ep=2": 2, "ep=2,tp=2": 2, "fsdp=4,ep=2": 4, "hsdp=2x2,ep=2": 4}


def build(mesh, capacity=2.0, collapsed=False, **options):
    with torch.device("meta"):
        model = DeepSeekV3(CONFIG)
    parallelize(
        model,
        mesh,
        family_of(CONFIG).tp_plan(CONFIG),
        device="cuda",
        param_dtype=torch.bfloat16,
        expert_capacity=capacity,
        **options,
    )
    model.init_weights(0, local_parts(model))
    if collapsed:
        for router in model.routers:  # every token to the first two experts, those of one rank
            router.expert_bias.copy_(-10.0 * torch.arange(CONFIG.moe.n_experts))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def batch_of(mesh, step):
    generator = torch.Generator().manual_seed(1000 * step + mesh.dp_place)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 513), generator=generator).cuda()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def parts_of(model):
    return [*(p.detach().to_local() for p in model.parameters()), *model.buffers()]


def _one_graph_bitwise_eager(mesh, **options):
    model, optimizer = build(mesh, **options)
    step = stepgraph.capture(
        model, next_token_loss(mesh), batch_of(mesh, 0), optimizer, max_grad_norm=1.0, passes=configured("exact")
    )
    assert step.verify(batch_of(mesh, 1)).bitwise
    for i in range(4):
        step(batch_of(mesh, i))
        assert step.metrics["repeated"] == 0
    report = next(report for report in step.report if report.name == "cuda_graph")
    assert report.summary.startswith("1 CUDA graph, 0 nodes on the host"), report.notes


@pytest.mark.parametrize("spec", MESHES)
def test_a_step_is_one_cuda_graph_and_bitwise_eager(spec):
    on_gpus(spec, _one_graph_bitwise_eager)


SYMMETRIC = {"expert_exchange": "symmetric", "expert_chunks": 2}


@pytest.mark.parametrize("spec", ["fsdp=2,ep=2", "ep=2,tp=2", "fsdp=4,ep=4"])
def test_over_symmetric_memory_too(spec):
    on_gpus(spec, partial(_one_graph_bitwise_eager, **SYMMETRIC))


def _tokens_in_fp8(mesh):
    """By NCCL and over symmetric memory, with the bits of tokens that are cast after they arrive."""
    outcomes, dtypes = [], []
    for exchange, travel in (("collectives", False), ("collectives", True), ("symmetric", True)):
        model, optimizer = build(mesh, expert_exchange=exchange)
        off = () if travel else ("exchange_fp8",)
        passes = [
            p.with_options(unprofitable=True) if p.name == "fp8_experts" else p
            for p in configured(inductor="off", fp8="rowwise", fp8_experts=True, disable_pass=off)
        ]
        step = stepgraph.capture(
            model, next_token_loss(mesh), batch_of(mesh, 0), optimizer, max_grad_norm=1.0, passes=passes
        )
        found = [step(batch_of(mesh, i)).clone() for i in range(4)]
        reports = {r.name: r for r in step.report}
        assert reports["fp8_experts"].changed == reports["fp8_experts"].matched > 0, reports["fp8_experts"].notes
        dtypes.append("exchanges in fp8" in reports["exchange_fp8"].summary if travel else False)
        outcomes.append((found, parts_of(model)))
    assert dtypes == [False, True, True]
    for other in outcomes[1:]:
        assert all(all(map(torch.equal, *both)) for both in zip(outcomes[0], other, strict=True))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="groups in fp8 need compute capability 9.0",
)
def test_tokens_travel_in_fp8():
    on_gpus("fsdp=2,ep=2", _tokens_in_fp8)


def _same_bits_as_nccl(mesh):
    """Steps whose routing differs, from all tokens on one rank on, repeated where that does not fit; then one that is
    broken off, after which memory is made anew and graphs are recorded again."""
    outcomes = []
    for options in ({"expert_chunks": 2}, SYMMETRIC):
        model, optimizer = build(mesh, 0.75, collapsed=True, **options)
        step = stepgraph.capture(
            model, next_token_loss(mesh), batch_of(mesh, 0), optimizer, max_grad_norm=1.0, passes=configured("exact")
        )
        found = []
        for i in range(9):
            if i == 4:  # routing is natural from here on
                for router in model.routers:
                    router.expert_bias.zero_()
            if i == 6:
                step._session.forget(step._current.runner.runners["step"].groups)
            if i % 2 == mesh.dp_place % 2:  # the others wait for this rank
                torch.cuda._sleep(20_000_000)
            found += [step(batch_of(mesh, i)), step.metrics["grad_norm"]]
            assert step.metrics["repeated"] == (i == 0), i
        outcomes.append((found, parts_of(model)))
    assert all(all(map(torch.equal, *both)) for both in zip(*outcomes, strict=True))


@pytest.mark.parametrize("spec", ["fsdp=2,ep=2", "fsdp=4,ep=4"])
def test_symmetric_memory_gives_the_bits_of_nccl(spec):
    on_gpus(spec, _same_bits_as_nccl)


def _replayed(mesh):
    """Exchanges alone, forward and backward, and two under way at a time, in one CUDA graph: replayed with other tokens
    and other routing, to one rank and to few experts too."""
    axes, tokens, slots, experts, D = mesh.experts, 512, 2, 8, 200
    x = torch.zeros(2, tokens, D, device="cuda", dtype=torch.bfloat16)
    chosen = torch.zeros(2, tokens, slots, device="cuda", dtype=torch.int64)
    weights = torch.zeros(2, tokens, slots, device="cuda")

    def run(exchange):
        leaves = [x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()]
        with conditions.collected():  # the room of a captured step
            sent = [exchange.dispatch(leaves[0][i], chosen[i], experts) for i in range(2)]
        found = [exchange.combine(rows.sin(), leaves[1][i], state) for i, (rows, _, state) in enumerate(sent)]
        grads = torch.autograd.grad([y.float().square().sum() for y in found], leaves)
        return [*found, *grads, *(ends for _, ends, _ in sent), *(rows for rows, _, _ in sent)], sent

    def at_once(sent):
        group, ops = axes.axis("ep").get_group(), torch.ops.stepgraph
        where, places = (group.size(), group.group_name), [state for _, _, state in sent]
        begun = [ops.rows_begin(x[i], o, slots, there, back, *where) for i, (o, _, there, back) in enumerate(places)]
        return [ops.rows_end(token, x[i], places[i][3], *where) for i, token in enumerate(begun)]

    ours, theirs = (kind(axes, Capacity(64.0)) for kind in (SymmetricExchange, ExpertExchange))
    at_once(run(ours)[1])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        replayed, sent = run(ours)
        together = at_once(sent)
    generator = torch.Generator("cuda").manual_seed(mesh.dp_place)
    for highest in (experts, 1, experts // 2, 3, experts, 2):
        x.normal_(generator=generator), weights.uniform_(generator=generator)
        scores = torch.rand(2, tokens, experts, device="cuda", generator=generator)
        scores[..., highest + 1 :] -= 1.0  # a token chooses an expert once
        chosen.copy_(scores.topk(slots)[1])
        if highest % 2 == mesh.dp_place % 2:
            torch.cuda._sleep(20_000_000)
        graph.replay()
        expected, _ = run(theirs)
        same = [torch.equal(mine, other) for mine, other in zip(replayed[:-2], expected[:-2], strict=True)]
        assert all(same) and all(map(torch.equal, together, replayed[-2:])), (highest, same)


@pytest.mark.parametrize("spec", ["fsdp=2,ep=2", "fsdp=4,ep=4"])
def test_exchanges_over_symmetric_memory_replay(spec):
    on_gpus(spec, _replayed)


def _beside_messages(mesh):
    """`_replayed` where NCCL is not to be had: two processes of one GPU take turns on it. The reference is the exchange
    by messages of a CPU, which moves the same rows; what is summed on two devices may round otherwise."""
    axes, tokens, slots, experts, D = mesh.experts, 300, 2, 8, 200
    x = torch.zeros(tokens, D, device="cuda", dtype=torch.bfloat16)
    chosen = torch.zeros(tokens, slots, device="cuda", dtype=torch.int64)
    weights = torch.zeros(tokens, slots, device="cuda")
    exchange = SymmetricExchange(axes, Capacity(64.0))

    def run(x, chosen, weights):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights)]
        with conditions.collected():
            rows, ends, state = exchange.dispatch(leaves[0], chosen, experts)
        y = exchange.combine(2 * rows, leaves[1], state)
        return [rows, ends, *state[2:]], [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    run(x, chosen, weights)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        moved, summed = run(x, chosen, weights)
    generator = torch.Generator("cuda").manual_seed(mesh.dp_place)
    for highest in (experts, 1, experts // 2, 3, experts, 2):
        x.normal_(generator=generator), weights.uniform_(generator=generator)
        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        scores[..., highest + 1 :] -= 1.0
        chosen.copy_(scores.topk(slots)[1])
        if highest % 2 == mesh.dp_place % 2:
            torch.cuda._sleep(20_000_000)
        graph.replay()
        rows, sums = run(x.cpu(), chosen.cpu(), weights.cpu())
        assert all(torch.equal(mine.cpu(), other) for mine, other in zip(moved, rows, strict=True)), highest
        for mine, other in zip(summed, sums, strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=2e-2, atol=1e-2 * other.abs().max().item())


def test_exchanges_between_two_processes_of_one_gpu():
    on_one_gpu("fsdp=2,ep=2", _beside_messages)


def _default_passes(mesh):
    """Beside copies of parameters by copy engines, compiled."""
    losses = []
    for options in ({}, SYMMETRIC):
        model, optimizer = build(mesh, **options)
        passes = configured(copy_engines=True)
        step = stepgraph.capture(
            model, next_token_loss(mesh), batch_of(mesh, 0), optimizer, max_grad_norm=1.0, passes=passes
        )
        losses.append(torch.stack([step(batch_of(mesh, i)) for i in range(5)]))
        assert step.report[-1].summary.startswith("1 CUDA graph, 0 nodes on the host"), step.report[-1].notes
    torch.testing.assert_close(*losses, rtol=5e-3, atol=5e-3)


def test_symmetric_memory_beside_copy_engines():
    on_gpus("fsdp=2,ep=2", _default_passes)


def _repeated(mesh):
    outcomes = []
    for capacity in (0.5, 16.0):
        model, optimizer = build(mesh, capacity, collapsed=True)
        step = stepgraph.capture(
            model, next_token_loss(mesh), batch_of(mesh, 0), optimizer, max_grad_norm=1.0, passes=configured("exact")
        )
        losses, repeats = [], []
        for i in range(5):  # the third replays
            losses.append(step(batch_of(mesh, i)))
            repeats.append(int(step.metrics["repeated"]))
        outcomes.append((losses, repeats, parts_of(model)))
    (small, repeats, state), (large, never, expected) = outcomes
    assert repeats[0] >= 1 and repeats[2:] == [0, 0, 0] and never == [0] * 5
    assert all(map(torch.equal, small, large)) and all(map(torch.equal, state, expected))


@pytest.mark.parametrize("spec", ["fsdp=2,ep=2", "fsdp=4,ep=2"])
def test_routing_that_needs_more_room_repeats_the_step(spec):
    on_gpus(spec, _repeated)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("passes", ["exact", "default"])
def test_a_step_left_out_changes_nothing_in_a_cuda_graph(passes, master):
    """Warm-up, recording and replays: a spoiled step keeps every bit, and others are those of an unguarded step."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if master else torch.float32
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 8)).to("cuda", dtype)
    other = copy.deepcopy(model)

    def optimizer_of(m):
        return stepgraph.MasterAdamW(m.parameters()) if master else torch.optim.AdamW(m.parameters(), fused=True)

    def loss_fn(m, batch):
        return (m(batch["x"]) - batch["y"]).float().square().mean()

    batch = {"x": torch.randn(32, 64, device="cuda", dtype=dtype), "y": torch.randn(32, 8, device="cuda", dtype=dtype)}
    spoiled = batch | {"y": batch["y"] * float("nan")}
    optimizer = optimizer_of(model)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0, on_nonfinite="skip", passes=passes)
    plain = stepgraph.capture(other, loss_fn, batch, optimizer_of(other), max_grad_norm=1.0, passes=passes)
    for i in range(6):
        entries = [t for entry in optimizer.state.values() for t in entry.values()]
        state = [*model.parameters(), *model.buffers(), *entries]
        before = [t.detach().clone() for t in state]
        step(spoiled)
        assert step.metrics["skipped"], i
        assert all(map(torch.equal, before, state)), i
        torch.testing.assert_close(step(batch), plain(batch), rtol=0 if passes == "exact" else 1e-2, atol=0)
        assert not step.metrics["skipped"], i
    if passes == "exact":
        assert all(map(torch.equal, model.parameters(), other.parameters()))
