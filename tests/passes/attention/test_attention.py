"""Attention by another backend: what is chosen, what the graph becomes, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.capture import InputSpec, Provenance, StepGraph, set_provenance
from stepgraph.compat import FakeTensorMode
from stepgraph.config.presets import PRESETS
from stepgraph.costs.attention import OPERATORS, Case, case_of, seconds
from stepgraph.costs.hardware import GPUS
from stepgraph.graph.facts import argument
from stepgraph.graph.values import BatchLeaf, Metric, Parameter
from stepgraph.inspect.forecast import forecast
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions, Target, chosen, get, run_passes
from stepgraph.passes.attention import choose
from stepgraph.passes.attention.backends import BACKENDS, refusal
from tests.costs.graphs import Hand
from tests.passes.attention import test_attention_windows as windows

aten, ours = torch.ops.aten, torch.ops.stepgraph
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
BF16 = torch.bfloat16
FORWARD = {
    "cudnn": aten._scaled_dot_product_cudnn_attention.default,
    "flash2": aten._scaled_dot_product_flash_attention.default,
    "efficient": aten._scaled_dot_product_efficient_attention.default,
    "fa4": ours.flash4_attention.default,
    "flex": torch.ops.higher_order.flex_attention,
}


@pytest.fixture(autouse=True)
def fa4(monkeypatch):
    """flash-attn-4 as if it were installed; ``fa4(why)``: it is not."""

    def because(why):
        monkeypatch.setattr(choose, "unavailable", lambda: why)

    because(None)
    return because


def attend(op, q, k, v, dy, causal=True, scale=None, dropout=0.0, bias=None):
    """Forward and backward by the operators of ``op``: (result, dq, dk, dv)."""
    if op == "flash2":
        out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)
        rest = (None, None, q.shape[2], k.shape[2], dropout, causal, seed, offset)
        return out, *aten._scaled_dot_product_flash_attention_backward(dy, q, k, v, out, lse, *rest, scale=scale)
    if op == "cudnn":
        out, lse, *_, seed, offset, _ = FORWARD[op](q, k, v, bias, True, dropout, causal, False, scale=scale)
        rest = (seed, offset, bias, None, None, q.shape[2], k.shape[2], dropout, causal)
        return out, *aten._scaled_dot_product_cudnn_attention_backward(dy, q, k, v, out, lse, *rest, scale=scale)
    if op == "efficient":
        out, lse, seed, offset = FORWARD[op](q, k, v, bias, True, dropout, causal, scale=scale)
        rest = (bias, out, lse, seed, offset, dropout, [True, True, True, False], causal)
        backward = aten._scaled_dot_product_efficient_attention_backward
        return out, *backward(dy, q, k, v, *rest, scale=scale)[:3]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return out, *backward(dy, q, k, v, out, lse, dropout, causal, scale=scale)


def attention_graph(
    op="cudnn",
    *,
    shape=(4, 32, 8, 4096, 64, 64),
    layouts="tttt",
    dtype=BF16,
    device="cuda",
    layers=1,
    expanded=False,
    **options,
):
    """Attention by ``op``, ``layers`` times, with q, k, v and dy laid out by tokens (t) or by heads (h).

    ``shape``: batch, heads, heads of keys, tokens, channels of queries and keys, of values.
    ``expanded``: one head of keys and values is viewed as many.
    """
    B, H, H_kv, T, D, D_v = shape
    if op == "efficient":  # which has keys for every head
        H_kv = H

    def made(heads, width, layout):
        if layout == "t":
            return torch.empty(B, T, heads, width, dtype=dtype, device=device).transpose(1, 2)
        return torch.empty(B, heads, T, width, dtype=dtype, device=device)

    def program(q, k, v, dy, bias):
        k, v = (x.expand(B, H, T, -1) if expanded else x for x in (k, v))
        results = [attend(op, q, k, v, dy, bias=bias, **options) for _ in range(layers)]
        # What reads them in the strides that they have.
        return [*(r for some in results for r in some), results[0][0].transpose(1, 2).reshape(B, T, -1)]

    with FakeTensorMode():
        sizes = ((H, D), (H_kv, D), (H_kv, D_v), (H, D_v))
        inputs = [made(*size, layout) for size, layout in zip(sizes, layouts, strict=True)]
        bias = torch.empty(B, H, T, T, dtype=dtype, device=device) if options.pop("masked", False) else None
        module = make_fx(program)(*inputs, bias)
    for node in module.graph.nodes:
        if node.op == "call_function":
            phase = "backward" if "backward" in str(node.target) else "forward"
            set_provenance(node, Provenance("layers.0.attn", phase, "model.py:1"))
    for node in module.graph.find_nodes(op="placeholder"):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            module.graph.erase_node(node)
    inputs = [InputSpec(Parameter(str(i))) for i, _ in enumerate(module.graph.find_nodes(op="placeholder"))]
    outputs = [Metric(str(i)) for i in range(len(module.graph.output_node().args[0]))]
    return StepGraph(module, inputs, outputs)


def device_for(backend):
    """FlexAttention's blocks are constants, real tensors, of the device that the graph is for."""
    return "cpu" if backend == "flex" else "cuda"


def rewritten(step, backend="auto", capability=HOPPER, simulated=False):
    target = Target("cuda", capability=capability, simulated=simulated)
    (report,) = run_passes(step, [get("attention", backend=backend)], target=target)
    return report


def count(step, target):
    return len(step.graph.find_nodes(op="call_function", target=target))


def forms(step):
    return [
        (n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype) for n in step.graph.output_node().args[0]
    ]


# What the graph becomes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["cudnn", "flash2", "efficient"])
@pytest.mark.parametrize("layouts", ["tttt", "htht"])
@pytest.mark.parametrize(("shape", "causal"), [((2, 4, 2, 48, 64, 64), True), ((1, 2, 2, 40, 96, 96), False)])
def test_any_backend_takes_the_place_of_any(backend, op, layouts, shape, causal):
    where = device_for(backend)
    step = attention_graph(op, shape=shape, layouts=layouts, causal=causal, scale=0.3, layers=2, device=where)
    before = forms(step)
    report = rewritten(step, backend)  # which checks shapes, strides and dtypes of every node
    assert (report.matched, report.changed) == (2, 0 if op == backend else 2)
    assert forms(step) == before
    for made, target in FORWARD.items():
        nodes = step.graph.find_nodes(op="call_function", target=target)
        assert len(nodes) == (2 if made == backend else 0)
        for node in nodes:
            assert case_of(node).causal is causal
            assert (node.args[5] if made == "flex" else argument(node, "scale")) == 0.3
    directions = [OPERATORS[n.target] for n in step.graph.nodes if n.target in OPERATORS]
    assert directions == [(backend, "forward"), (backend, "backward")] * 2
    backward = [n for n in step.graph.nodes if "backward" in str(n.target)]
    assert all(n.meta["stepgraph"].path == "layers.0.attn" for n in backward)
    assert all(n.meta["stepgraph"].phase == "backward" for n in backward)


def test_layouts_of_cudnn_are_kept_without_a_copy():
    for layouts in ("tttt", "hhhh", "thth"):
        for backend in BACKENDS:
            step = attention_graph(layouts=layouts, shape=(2, 4, 2, 48, 64, 64), device=device_for(backend))
            rewritten(step, backend)
            assert count(step, aten.permute.default) == 0, (layouts, backend)


def contiguous(x):
    return x.clone(memory_format=torch.contiguous_format)


COPIES = dict.fromkeys(("contiguous", "read elsewhere", "written", "part of more", "odd rows"), contiguous) | {
    "an empty cache": lambda x: torch.cat([x.new_empty(0), x], dim=-2),
    "both": lambda x: torch.cat([x.new_empty(0), contiguous(x)], dim=-2),
}


@pytest.mark.parametrize("op", ["cudnn", "flash2"])
@pytest.mark.parametrize("kind", COPIES)
def test_inputs_are_read_in_place(kind, op):
    """But for copies that others read, of what is written, of a small part of memory, of rows that do not align."""

    def program(q, key, value, dy):
        k, v = (COPIES[kind](x) for x in (key, value))
        if kind == "written":
            key, value = key.mul_(2), value.mul_(2)
        results = attend(op, q, k, v, dy)
        return *results, *([k, v] if kind == "read elsewhere" else [])

    row = {"part of more": 3 * 256, "odd rows": 257}.get(kind, 256)
    with FakeTensorMode():
        whole = [
            torch.empty_strided((2, 48, 4, 64), (48 * n, n, 64, 1), dtype=BF16, device="cuda")
            for n in (256, row, row, 256)
        ]
        module = make_fx(program)(*(x.transpose(1, 2) for x in whole))
    for node in module.graph.nodes:
        if node.op == "call_function":
            phase = "backward" if "backward" in str(node.target) else "forward"
            set_provenance(node, Provenance("attn", phase, "model.py:1"))
    step = StepGraph(module, [InputSpec(BatchLeaf(i)) for i in range(4)], [])
    step.outputs = [Metric(str(i)) for i in range(len(module.graph.output_node().args[0]))]
    before = forms(step)
    report = rewritten(step)
    ((q, k, v),) = [n.args[:3] for n in step.graph.nodes if n.target is FORWARD[op]]
    lies = kind in ("an empty cache", "contiguous", "both")
    assert [k.op == v.op == "placeholder", any("read in place" in note for note in report.notes)] == [lies, lies]
    assert forms(step) == before and (report.changed, q.op) == (0, "placeholder")
    copies = count(step, aten.cat.default) + count(step, aten.clone.default)
    assert copies == 2  # of the gradients, which readers know as contiguous, or of what stays


@pytest.mark.parametrize("backend", ["flash2", "fa4"])
def test_forward_alone(backend):
    def program(q):
        return FORWARD["cudnn"](q, q, q, None, False, 0.0, True, False)[0]

    with FakeTensorMode():
        module = make_fx(program)(torch.empty(1, 2, 16, 64, dtype=BF16, device="cuda"))
    for node in module.graph.nodes:
        if node.op == "call_function":
            set_provenance(node, Provenance("attn", "forward", "model.py:1"))
    step = StepGraph(module, [InputSpec(BatchLeaf(0))], [Metric("y")])
    assert rewritten(step, backend).changed == 1
    assert [OPERATORS[n.target] for n in step.graph.nodes if n.target in OPERATORS] == [(backend, "forward")]


def test_the_rewritten_step_computes_the_same():
    """On a CPU, where FlashAttention 4 is its reference and the captured operator is torch's own."""
    shape = (2, 4, 2, 24, 32, 32)
    torch.manual_seed(0)
    q, dy = (torch.randn(2, 24, 4, 32).transpose(1, 2).to(BF16) for _ in "qd")
    k, v = (torch.randn(2, 2, 24, 32).to(BF16) for _ in "kv")
    right = attend("cpu", *(x.double() for x in (q, k, v, dy)))
    step = attention_graph("cpu", shape=shape, layouts="thht", device="cpu")
    assert rewritten(step, "fa4", simulated=True).changed == 1
    mine = step.module(q, k, v, dy)[:4]
    theirs = attend("cpu", q, k, v, dy)
    for found, exact, usual in zip(mine, right, theirs, strict=True):
        assert found.dtype == BF16
        assert (found - exact).abs().max() <= 1.5 * (usual - exact).abs().max() + 1e-3


# What is chosen

shapes = st.tuples(
    st.sampled_from([1, 2, 4, 32]),
    st.sampled_from([4, 8, 32]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 128, 1024, 2048, 4096, 16384]),
    st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (20, 20), (64, 512)]),
    st.booleans(),
    st.sampled_from([BF16, torch.float16, torch.float32]),
)


def case_from(drawn):
    batch, heads, shared, length, widths, causal, dtype = drawn
    return Case(batch, heads, heads // shared, length, length, *widths, causal, dtype)


@settings(deadline=None)
@given(shapes, st.sampled_from([HOPPER, BLACKWELL, AMPERE, (8, 9), (7, 5), None]), st.sampled_from(BACKENDS))
def test_the_fastest_of_what_was_measured(drawn, capability, base):
    case = case_from(drawn)
    options = choose.AttentionOptions(capability=capability)
    able = [b for b in BACKENDS if refusal(b, case, capability) is None]
    if base not in able:
        return
    backend, why = choose.fastest(case, base, able, True, options)
    assert backend in able
    known = {b: seconds(b, case, GPUS["h200"], backward=True) for b in able}
    if capability != HOPPER or known[base] is None:
        assert backend == base and "torch's order" in why
    else:
        assert known[backend] == min(s for s in known.values() if s is not None)
        assert f"{1e3 * known[backend]:.2f} ms" in why
    for change, reason in (({"deterministic": True}, "deterministic"), ({"lengths_vary": True}, "every length")):
        found, why = choose.fastest(case, base, able, True, replace(options, **change))
        assert found == base and reason in why


@settings(deadline=None)
@given(shapes, st.sampled_from([HOPPER, BLACKWELL]))
def test_what_a_backend_takes_its_operators_take(drawn, capability):
    """What the rules allow, torch's fake kernels and ours give results for."""
    case = case_from(drawn)
    with FakeTensorMode():
        q = torch.empty(case.batch, case.heads, case.queries, case.width, dtype=case.dtype, device="cuda")
        k = q.new_empty(case.batch, case.kv_heads, case.keys, case.width)
        v = q.new_empty(case.batch, case.kv_heads, case.keys, case.value_width)
        for backend in (b for b in BACKENDS if b != "flex"):
            if refusal(backend, case, capability) is None:
                assert case.dtype != torch.float32 and case.width % 8 == 0
                rest = {"cudnn": (None, True, 0.0), "flash2": (0.0,), "fa4": (None,)}[backend]
                out = FORWARD[backend](q, k, v, *rest, case.causal)[0]
                assert out.shape == (*q.shape[:3], case.value_width)


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        ((4, 32, 8, 4096, 64, 64), "fa4"),
        ((1, 32, 8, 8192, 128, 128), "fa4"),
        ((4, 16, 16, 4096, 192, 128), "fa4"),
        ((4, 16, 16, 4096, 256, 256), "cudnn"),  # FlashAttention 4 is slower backward
        ((1, 8, 8, 256, 64, 64), "cudnn"),  # not measured: as torch has it
    ],
)
def test_auto_on_hopper(shape, chosen):
    step = attention_graph(shape=shape)
    report = rewritten(step)
    assert count(step, FORWARD[chosen]) == 1 and f"1 by {chosen}" in report.summary
    assert any("layers.0.attn" in note and note.startswith(chosen) for note in report.notes)
    assert any("deterministic" in note for note in report.notes)


def test_auto_without_the_package_says_what_it_would_give(fa4):
    fa4("flash-attn-4 is not installed")
    step = attention_graph()
    report = rewritten(step)
    assert report.changed == 0 and count(step, FORWARD["cudnn"]) == 1
    assert "2.54 ms" in report.notes[0] and "fa4 would take 2.15, but flash-attn-4 is not installed" in report.notes[0]


def test_what_auto_leaves_says_why():
    for op, options, reason in [
        ("cudnn", {"dropout": 0.25}, "it has dropout"),
        ("efficient", {"masked": True}, "it has a mask"),
        ("efficient", {"dtype": torch.float32}, "it computes in float32"),
        ("cudnn", {"causal": False}, "cudnn was not measured"),
    ]:
        step = attention_graph(op, **options)
        text = step.text()
        report = rewritten(step)
        assert report.matched == 1 and report.changed == 0 and step.text() == text
        assert reason in report.notes[0], report.notes


def test_what_a_mask_made_slow_is_chosen_anew():
    """The memory-efficient attention, which takes masks, once the pass before has dropped one."""
    step = attention_graph("efficient")
    rewritten(step, capability=AMPERE)
    assert count(step, FORWARD["flash2"]) == 1


def test_deterministic_algorithms_leave_cudnn_out(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    step = attention_graph("flash2")
    with pytest.raises(ValueError, match=r"attention=cudnn.*use_deterministic_algorithms"):
        rewritten(step, "cudnn")
    assert rewritten(attention_graph("flash2")).changed == 0
    step = attention_graph("flash2")
    rewritten(step, "fa4")
    (backward,) = step.graph.find_nodes(op="call_function", target=ours.flash4_attention_backward.default)
    assert argument(backward, "deterministic") is True


# What is refused


@pytest.mark.parametrize(
    ("backend", "options", "capability", "reason", "allowed"),
    [
        ("cudnn", {"dropout": 0.25, "op": "flash2"}, HOPPER, "dropout", "eager, flash2"),
        ("flash2", {"shape": (4, 16, 16, 64, 192, 128)}, HOPPER, "not of 192 and 128", "eager, cudnn, fa4, flex"),
        ("fa4", {}, AMPERE, "capability 9 or 10", "eager, cudnn, flash2, flex"),
        ("fa4", {"dtype": torch.float32, "op": "efficient"}, HOPPER, "float32", "eager, flex"),
    ],
)
def test_a_named_backend_is_refused_in_one_line(backend, options, capability, reason, allowed):
    with pytest.raises(ValueError, match=f"attention={backend} does not support layers.0.attn") as error:
        rewritten(attention_graph(**options), backend, capability)
    text = str(error.value)
    assert reason in text and f"allowed for all of this step: auto, {allowed}: " in text and "\n" not in text


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive_stays(scale):
    """Of which FlashAttention makes NaN or infinity; FlexAttention multiplies first."""
    shape = (4, 32, 8, 4096, 64, 64)
    with pytest.raises(ValueError, match=rf"multiplied by {scale}, which is not positive; allowed .* cudnn, flex:"):
        rewritten(attention_graph(shape=shape, scale=scale), "fa4")
    report = rewritten(attention_graph(shape=shape, scale=scale))
    assert report.changed == 0 and report.summary.endswith("1 by cudnn")
    assert rewritten(attention_graph(shape=(2, 4, 2, 48, 64, 64), scale=scale, device="cpu"), "flex").changed == 1


def test_a_missing_package_is_refused_with_its_fix(fa4):
    fa4("flash-attn-4 is not installed")
    with pytest.raises(ValueError, match=r"not installed.*allowed.*cudnn, flash2.*pip install flash-attn-4"):
        rewritten(attention_graph(), "fa4")


def test_expanded_keys_are_not_for_fa4():
    step = attention_graph(shape=(2, 4, 1, 48, 64, 64), expanded=True)
    with pytest.raises(ValueError, match="share memory"):
        rewritten(step, "fa4")


def test_windows_and_what_the_model_calls_itself_are_listed():
    step = windows.attention_graph(windows.sliding)
    target = Target("cuda", capability=HOPPER)
    passes = [get("attention_windows"), get("attention")]
    assert run_passes(step, passes, target=target)[1].summary == "2 attentions, 0 changed: 2 by flash2, as a window"
    step = windows.attention_graph(windows.sliding)
    with pytest.raises(ValueError, match=r"attention=cudnn.*runs by flash2, as a window; allowed .*: auto, eager:"):
        run_passes(step, [passes[0], get("attention", backend="cudnn")], target=target)
    hand = Hand()
    q = hand.input(1, 2, 128, 64, dtype=BF16)
    flex = hand(torch.ops.higher_order.flex_attention, q, q, q, val=(q.meta["val"],) * 2)
    assert "1 by flex" in rewritten(hand.step(flex)).summary


def test_a_mask_that_says_causal_is_gone_before_the_choice():
    step = windows.attention_graph(lambda q, padding: windows.distances(q) >= 0)
    run_passes(
        step,
        [get("attention_windows"), get("attention", backend="fa4")],
        target=Target("cuda", capability=HOPPER),
    )
    found = step.graph.find_nodes(op="call_function", target=FORWARD["fa4"])
    assert len(found) == 2 and all(argument(node, "is_causal") for node in found)


def test_options():
    names = {p.name: p for p in chosen(StepOptions(attention="flash2"))}
    assert names["attention"].options.backend == "flash2"
    assert {p.name: p for p in chosen(StepOptions(any_length=True))}["attention"].options.lengths_vary
    assert not {"attention", "attention_windows"} & {p.name for p in chosen(StepOptions(attention="eager"))}
    assert "attention" not in {p.name for p in chosen(StepOptions("exact"))}
    with pytest.raises(ValueError, match="passes=exact"):
        chosen(StepOptions("exact", attention="cudnn"))
    with pytest.raises(ValueError, match="flash3"):
        chosen(StepOptions(attention="flash3"))


# A whole step

TINY = Llama3Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, max_seq_len=16)


def simulated(backend):
    """The pass on a CPU's graph, as in a forecast: FlashAttention 4's reference can then run."""
    options = {"simulated": True, "capability": HOPPER}
    return replace(
        get("attention", backend=backend, **options), needs_cuda=False, for_target=lambda options, target: options
    )


@pytest.mark.parametrize("memory", ["none", "full"])
def test_a_step_recomputed_and_verified(memory):
    torch.manual_seed(0)
    model = Llama3(TINY).to(BF16)
    tokens = torch.randint(64, (2, 2, 16))
    batch = {"tokens": tokens[0], "targets": tokens[1]}
    passes = [simulated("fa4"), get("recompute", policy=memory)]
    step = stepgraph.capture(model, next_token_loss, batch, torch.optim.AdamW(model.parameters()), passes=passes)
    assert count(step.graph, ours.flash4_attention.default) == (4 if memory == "full" else 2)
    assert count(step.graph, ours.flash4_attention_backward.default) == 2
    report = step.verify(batch)
    assert report.close and not report.bitwise, str(report)
    assert torch.isfinite(step(batch))


def test_values_that_a_model_pads_for_the_cpu_are_no_refusal():
    """DeepSeek's keys of 192 channels and values of 128, which cuDNN takes on a GPU."""
    hand = Hand()
    q = hand.input(1, 2, 64, 192, dtype=BF16)
    v = hand(aten.constant_pad_nd.default, hand.input(1, 2, 64, 128, dtype=BF16), [0, 64])
    out = hand(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, v, 0.0, True)
    report = rewritten(hand.step(out), "cudnn", simulated=True)
    assert report.changed == 0 and "padded only for the CPU" in report.notes[0]


@pytest.mark.parametrize(
    ("gpu", "attention", "expected"), [("h200", "fa4", "fa4"), ("h200", "flex", "flex"), ("b200", "auto", "cudnn")]
)
def test_a_forecast_has_the_backends_of_its_gpu(gpu, attention, expected):
    config = PRESETS["llama3-debug"]()
    settings = {"mesh": "fsdp=1", "precision": "bf16", "device": "cpu", "attention": attention, "inductor": "regional"}
    config = replace(config, model=replace(config.model, n_layers=1), **settings)
    with forecast.simulated(config, GPUS[gpu]) as (program, _):
        nodes = [n.target for n in program.main.graph.nodes if n.target in OPERATORS]
    assert [OPERATORS[target] for target in nodes] == [(expected, "forward"), (expected, "backward")]
