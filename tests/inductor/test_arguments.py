"""Keyword arguments of operators that Inductor's patterns do not name reach the compiled code."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.inductor.regional import WRITTEN, Piece, Region, compile_pieces, keep_rounding, write_arguments

aten = torch.ops.aten

#: What a pattern may ignore: ``out`` is never in a graph of ours. The others do not change values where it matches:
#: (operator, argument).
HARMLESS = {
    *((aten.full, name) for name in ("device", "layout", "pin_memory", "names")),  # it writes another constant there
    (aten.scalar_tensor, "pin_memory"),
    (aten.rand, "layout"),
    *((aten.randperm, name) for name in ("dtype", "layout")),  # an index in any case
    (aten.expand, "implicit"),
}
#: Handlers of passes that Inductor runs only if asked for by an option that we do not set.
ASKED_FOR = {"decompose_addmm"}
#: Operators of frozen and quantized models, which no training step has: patterns with one of them match nothing.
NOT_OURS = ("mkldnn", "onednn", "quantized_decomposed")


def patterns() -> Iterator[tuple[object, str]]:
    """(pattern, name of its handler) of every pattern that Inductor has registered."""
    from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad  # noqa: F401
    from torch._inductor.pattern_matcher import PatternMatcherPass

    post_grad.lazy_init()
    joint_graph.lazy_init()
    passes = {}
    for name in [name for name in sys.modules if name.startswith("torch._inductor.")]:
        for value in list(vars(sys.modules[name]).values()):
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            passes |= {id(one): one for one in held if isinstance(one, PatternMatcherPass)}
    for one in passes.values():
        for entry in (entry for entries in one.patterns.values() for entry in entries):
            yield entry.pattern, getattr(getattr(entry, "handler", None), "__name__", "")


def calls(pattern: object) -> Iterator[object]:
    """The calls of operators inside ``pattern``."""
    pending = [pattern]
    while pending:
        one = pending.pop()
        if isinstance(one, (list, tuple)):
            pending += one
        elif hasattr(one, "_match"):
            pending += [*getattr(one, "args", ()), *getattr(one, "kwargs", {}).values()]
            pending += [*getattr(one, "outputs", ()), getattr(one, "pattern", None)]
            if hasattr(one, "kwargs") and hasattr(one, "fns"):
                yield one


def ignored(call: object) -> Iterator[tuple[object, str]]:
    """(operator, keyword argument) that ``call`` matches whatever the argument is."""
    for target in call.fns:
        if isinstance(target, torch._ops.OpOverload):
            for argument in target._schema.arguments:
                if argument.kwarg_only and argument.name not in (*call.kwargs, "out"):
                    yield target.overloadpacket, argument.name


def ours(call: object) -> bool:
    return not any(str(target).startswith(NOT_OURS) for target in call.fns)


def test_patterns_ignore_no_argument_that_counts():
    known = {(operator, name) for operator, (name, _) in WRITTEN.items()} | HARMLESS
    seen, unknown = set(), {}
    for pattern, handler in patterns():
        found = list(calls(pattern))
        if handler in ASKED_FOR or not all(map(ours, found)):
            continue
        for pair in {pair for call in found for pair in ignored(call)}:
            seen.add(pair)
            if pair not in known:
                unknown[pair] = handler
    assert not unknown, "write the argument in stepgraph/inductor/regional.py, or say why it is harmless"
    assert (aten.sum, "dtype") in seen  # the walk finds patterns


ARITHMETIC = {
    "add": lambda x, y: torch.add(x, y, alpha=0.5),
    "add_ints": lambda x, y: torch.add(x, y.long(), alpha=0.5),
    "sub": lambda x, y: torch.sub(x, y, alpha=-3),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=0.3),
    "number": lambda x, y: torch.add(x, 2, alpha=0.5),
    "add_": lambda x, y: (x * 1).add_(y, alpha=0.5),
    "sum": lambda x, y: x.sum(0, dtype=torch.float64),
    "sum_narrow": lambda x, y: x.sum(0, dtype=torch.bfloat16),
    "cumsum": lambda x, y: (y > 0).cumsum(0, dtype=torch.int32),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_what_is_written_computes_the_same(name):
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    module = make_fx(ARITHMETIC[name], tracing_mode="fake")(x, y)
    expected = module(x, y)
    write_arguments(module.graph)
    module.recompile()
    given = {(n.target.overloadpacket, key) for n in fx_calls(module.graph) for key in n.kwargs}
    assert not given & {(operator, argument) for operator, (argument, _) in WRITTEN.items()}
    torch.testing.assert_close(module(x, y), expected)


def fx_calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


class Products(nn.Module):
    """Products added with factors, in every form that becomes one kernel."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.w = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x):
        y = torch.add(x, self.a @ self.b, alpha=0.5)  # LoRA's merge
        z = x @ self.w
        z.add_(y, alpha=0.25)
        z = torch.sub(z, self.a @ x, alpha=2.0)
        z = torch.add(y @ self.b, z @ self.a, alpha=-0.5)
        z = torch.addmm(z, y, self.w, beta=0.5, alpha=0.25)
        z = torch.baddbmm(z[None], y[None], self.w[None], beta=0.5, alpha=2.0)[0]
        z = torch.addcmul(z, y, self.w, value=0.3) + torch.addcdiv(z, y, self.w.exp(), value=-0.2)
        scores = torch.add(y @ z.T / 2, x, alpha=0.5).softmax(-1)  # attention with a factor on its mask
        shifted = z * 3
        shifted = torch.sub(shifted, shifted.amax(-1, keepdim=True), alpha=0.5).div(2).exp()
        return scores @ z + shifted


@pytest.mark.slow
def test_compiled_products_keep_their_factors():
    torch.manual_seed(0)
    model, x = Products(), torch.randn(4, 4)
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    step = stepgraph.capture(model, lambda m, x: m(x).square().mean(), x)
    torch.testing.assert_close(step(x), loss)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-4)


def test_rows_in_a_drawn_order():
    """Mixup: torch 2.13's own compile fails on it."""
    loss_fn = lambda m, x: (m(x)[torch.randperm(len(x))] * m(x[torch.randperm(len(x))]) * m(x)).mean()  # noqa: E731
    step = stepgraph.capture(nn.Linear(8, 8), loss_fn, torch.randn(6, 8))
    assert step.verify(torch.randn(6, 8)).close


@pytest.mark.parametrize(("drawn", "operator"), [(6, aten._unsafe_index.Tensor), (7, aten.index.Tensor)])
def test_indices_of_rows_that_are_not_there_are_still_checked(drawn, operator):
    graph = make_fx(lambda x: x[torch.randperm(drawn)], tracing_mode="fake")(torch.empty(6, 8)).graph
    write_arguments(graph)
    assert operator in {node.target for node in graph.nodes}


def compensated(p, c, u):
    """Kahan's sum in half precision, as optimizers write it in place."""
    c.add_(u)
    before = p.clone()
    p.add_(c)
    c.add_(before.sub_(p))
    return p


def stored(p, c, u):
    new = p + (c + u)
    lost = (c + u) - (new - p)
    p.copy_(new)
    c.copy_(lost)
    return new * 2


@pytest.mark.parametrize(("function", "rounded"), [(compensated, 2), (stored, 1)])
def test_what_an_input_becomes_is_read_as_it_is_stored(function, rounded):
    p, c, u = torch.randn(3, 8).bfloat16().mul_(torch.tensor([[1.0], [1e-3], [1e-3]])).unbind()
    module = make_fx(function, tracing_mode="fake")(p, c, u)
    expected = [p.clone(), c.clone(), u]
    expected.append(module(*expected))
    keep_rounding(module.graph)
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=aten.bitwise_or.Scalar)) == rounded
    torch.testing.assert_close([p, c, u, module(p, c, u)], expected, rtol=0, atol=0)


def test_what_is_compared_is_rounded_as_floats_alone():
    def function(x):
        half = x.bfloat16()
        return (
            half.view(torch.int16) > 3,
            half.float().split(2)[0] >= 0.1,
            half != 0.1,
            half.float().view(torch.int32) < 7,
        )

    x = torch.randn(4, 8)
    module = make_fx(function, tracing_mode="fake")(x)
    keep_rounding(module.graph)
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=aten.bitwise_or.Scalar)) == 3
    torch.testing.assert_close(module(x), function(x))


def test_what_jumps_reads_rounded_values():
    """An overflow of fp16 is found where it is not stored, and 2.999 is 3.0 in bf16."""

    def function(x):
        half, low = x.bfloat16(), x.half()
        ties = half[:, 1:].max(1).indices, half.sort(1).indices, half[:, 1:].argmax(1)
        return low.isinf(), low.sign(), half.floor(), half.round(), (x * 3).bfloat16().long(), *ties

    x = torch.tensor([[70000.0, 2.9999, 3.0001, 2.5001, -2.9999, 4.9999, 1e-9, 5.0, 5.0001]])
    module = make_fx(function, tracing_mode="fake")(x)
    keep_rounding(module.graph)
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=aten.bitwise_or.Scalar)) == 8
    torch.testing.assert_close(torch.compile(module)(x), function(x), rtol=0, atol=0)


def jumps(half):
    """What jumps where ``half`` crosses an integer, or where two elements are equal."""
    return [
        *(
            half.sign(),
            half.floor(),
            half.ceil(),
            half.trunc(),
            half.round(),
            half.frac(),
            half.fmod(3),
            half.fmod(0.1),
        ),
        *(
            half > 0,
            half == 1,
            half.float() >= 3,
            half.long(),
            half.bool(),
            half.logical_not(),
            half.any(1),
            half.signbit(),
        ),
        *(half.argmax(1), half.max(1).indices, half.sort(1).indices, half.topk(3, 1).indices, half.view(torch.int16)),
        *(aten.threshold_backward(half, half, 0), aten.hardtanh_backward(half, half, -1, 1), half.copysign(half - 1)),
        *(
            nn.functional.max_pool2d(half[None], 2, return_indices=True)[1],
            torch.where(half > 2, 1.0, 2.0),
            (1 / half).isinf(),
        ),
        *(
            nn.functional.hardshrink(half, 0.1),
            (half.clamp(0, 6) == 6),
            half.amax(1, keepdim=True) == half,
            half.isnan(),
        ),
    ]


CHAINS = {
    torch.float16: [lambda half: (half.float() - 3).to(half.dtype) * 2],
    torch.bfloat16: [
        lambda half: torch.cat([half[:8] - 3, half[8:] * 3 - 9]).flip(1).t().contiguous().view(16, 16),
        lambda half: half.clone().sub_(3).mul_(2),
    ],
}


@pytest.mark.parametrize("dtype", CHAINS)
def test_what_leads_to_a_jump_is_rounded_too(dtype):
    x = torch.arange(-8, 8).repeat_interleave(16).view(16, 16) + torch.randn(16, 16) * 3e-3
    function = lambda x: [made for chain in CHAINS[dtype] for made in jumps(chain(x.to(dtype)))]  # noqa: E731
    module = make_fx(function, tracing_mode="fake")(x)
    keep_rounding(module.graph)
    module.recompile()
    torch.testing.assert_close(torch.compile(module)(x), function(x), rtol=0, atol=0)


def test_what_leads_to_a_jump_outside_the_piece_is_rounded():
    """As to the remainder of floating-point numbers, which Inductor does not compile."""
    x = torch.arange(8).repeat_interleave(8) + torch.randn(64) * 3e-3
    function = lambda x: (x.bfloat16() * 3 - 9).remainder(3)  # noqa: E731
    module = make_fx(function, tracing_mode="fake")(x)
    inside = [node for node in module.graph.nodes if node.op == "call_function"][:-1]
    compiled = compile_pieces(module, [Piece(Region("product", "product"), inside)], {}).module
    assert torch.equal(compiled(x), function(x))


def test_products_that_lead_to_no_jump_keep_all_digits():
    norm = lambda x, w: (x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()).bfloat16() * w  # noqa: E731
    gate = lambda x, w: nn.functional.silu(norm(x, w)) * norm(x, w) + (x > 0)  # noqa: E731
    graph = make_fx(gate, tracing_mode="fake")(torch.empty(4, 4).bfloat16(), torch.empty(4).bfloat16()).graph
    keep_rounding(graph)
    assert not graph.find_nodes(op="call_function", target=aten.bitwise_or.Scalar)


def test_casts_to_fp8_are_left():
    function = lambda x: x.bfloat16().to(torch.float8_e4m3fn).float()  # noqa: E731
    keep_rounding(make_fx(function, tracing_mode="fake")(torch.empty(4)).graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_that_no_wider_operator_reads_stay(dtype):
    product = lambda x, w: ((x.to(dtype) @ w.to(dtype)).relu() * 2).float() > 0.3  # noqa: E731
    graph = make_fx(product, tracing_mode="fake")(torch.empty(4, 4), torch.empty(4, 4)).graph
    keep_rounding(graph)
    found = graph.find_nodes(op="call_function", target=aten.bitwise_or.Scalar)
    assert len(found) == 3 * (dtype is torch.bfloat16)  # the product and what the comparison reads of it
