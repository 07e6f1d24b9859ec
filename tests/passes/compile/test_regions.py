"""Which nodes are tagged as regions, and that gathering them and calling them apart changes no bit.

Inductor itself is in tests/inductor: here a stand-in runs each piece's operators as they are.
"""

import collections
import random
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph import compat
from stepgraph.graph.partition import split
from stepgraph.inductor import library
from stepgraph.inductor.regional import Region, region_of, tag
from stepgraph.models import Golf, GolfConfig
from stepgraph.passes import Pass, configured, get, run_passes
from stepgraph.passes.compile.gather import gather
from stepgraph.passes.contract import NoOptions
from stepgraph.passes.memory.rematerialize import rematerialize
from stepgraph.run.interpreter import Interpreter
from stepgraph.run.program import plain_runner

aten = torch.ops.aten
NORMS = get("fuse_norm", choice="inductor")
PREPARE = ["fold_constants", "remove_noop_views", "dedupe_casts", "dead_code", "recompute"]


@pytest.fixture
def compiled(monkeypatch):
    """(operators, options) of everything that would have been compiled; it runs as it is instead."""
    seen = []

    def as_it_is(piece, examples, options):
        assert [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")] == examples
        seen.append(([n.target for n in piece.graph.nodes if n.op == "call_function"], options))

        def run(args):
            results = piece(*args)
            args.clear()
            return results

        return run

    monkeypatch.setattr(compat, "inductor_compile", as_it_is)
    return seen


def golf():
    return Golf(GolfConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=37))


def captured(tools, model, loss_fn=None, **options):
    """A captured step after the cheap exact passes, its norms tagged."""
    step = tools.trace(model, loss_fn or tools.next_token_loss, tools.tokens()[0], **options)
    run_passes(step, [*PREPARE, NORMS])
    return step


def found(step):
    """By kind of region, how many there are in words."""
    *_, report = run_passes(step, ["tag_regions"])
    counts = report.notes[0].removeprefix("regions: ").split(", ")
    return dict(count.split(" ", 1) for count in counts)


def tagged(step, kind):
    """The nodes of each region of ``kind``."""
    regions = collections.defaultdict(list)
    for node in step.graph.nodes:
        if region_of(node) and region_of(node).kind == kind:
            regions[region_of(node)].append(node)
    return list(regions.values())


BF16 = torch.bfloat16
MODELS = {  # two layers each: (model, loss function, regions); golf normalizes q and k as well
    "llama": (lambda t: t.llama(), "next_token_loss", {"rope": 8, "swiglu": 4, "norm": 10}),
    "llama bf16": (lambda t: t.llama(BF16), "next_token_loss", {"rope": 8, "swiglu": 4, "norm": 10}),
    "llama autocast": (lambda t: t.llama(), "autocast_loss", {"rope": 8, "swiglu": 4, "norm": 10}),
    "hugging face": (lambda t: t.hugging_face(), "hugging_face_loss", {"rope": 8, "swiglu": 4, "norm": 10}),
    "hugging face bf16": (
        lambda t: t.hugging_face().to(BF16),
        "hugging_face_loss",
        {"rope": 8, "swiglu": 4, "norm": 10},
    ),
    "golf": (lambda t: golf(), "next_token_loss", {"rope": 0, "swiglu": 0, "norm": 20}),
    "golf bf16": (lambda t: golf().to(BF16), "next_token_loss", {"rope": 0, "swiglu": 0, "norm": 20}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_region_of_a_model_is_found(tools, name):
    build, loss_fn, expected = MODELS[name]
    step = captured(tools, build(tools), getattr(tools, loss_fn))
    assert found(step) == {
        "attention": "found nothing",
        **{kind: str(n or "found nothing") for kind, n in expected.items()},
    }
    pieces, notes = gather(step.graph)
    assert len(pieces) == sum(expected.values())
    # Later layers of golf add to what its first norm gave.
    assert notes == ["norm norm.0.forward waits for itself through nodes outside: cut into 2"] * ("golf" in name)
    phases = collections.Counter(
        (piece.region.kind, n.meta["stepgraph"].phase) for piece in pieces for n in piece.nodes[:1]
    )
    assert all(phases[kind, "forward"] == phases[kind, "backward"] == n // 2 for kind, n in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_norm_regions_hold_the_whole_norm_and_the_addition_before(tools, dtype):
    step = captured(tools, tools.llama(dtype))
    for node in step.nodes("forward", "backward"):
        if "norm" in node.meta["stepgraph"].path and region_of(node) is None:
            assert node.target in (aten.view.default,), node  # at an edge: the shape of a weight's gradient
    forward = [nodes for nodes in tagged(step, "norm") if any(n.target is aten.rsqrt.default for n in nodes)]
    residual = [n for nodes in forward for n in nodes if n.target is aten.add.Tensor]
    assert len(forward) == 5 and len(residual) == 4  # none before the first norm
    backward = [nodes for nodes in tagged(step, "norm") if nodes not in forward]
    sums = [[n.meta["val"].shape for n in nodes if n.target is aten.sum.dim_IntList] for nodes in backward]
    assert sums == [[(1, 1, 16), (4, 8, 1)]] * 5  # the weight's gradient with the rows' own reduction


class Inlined(nn.Module):
    """A norm, a rotation and a gated product written into one module, next to products of matrices."""

    def __init__(self, style="halves"):
        super().__init__()
        self.style = style
        self.first, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        angle = torch.outer(torch.arange(8.0), torch.arange(1.0, 9.0))
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin())

    def forward(self, x):  # (B, 8, 16)
        x = self.first(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + self.scale)
        gate, up = self.up(x).chunk(2, -1)
        x = self.down(F.silu(gate) * up)
        if self.style == "wide":  # in fp32, and back
            x = x.to(BF16)
            wide = x.float()
            a, b = wide.chunk(2, -1)
            return (wide * self.cos + torch.cat((-b, a), -1) * self.sin).to(BF16)
        return x * self.cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * self.sin


@pytest.mark.parametrize("style", ["halves", "wide"])
def test_regions_written_by_hand_in_one_module(tools, style):
    batch = {key: torch.randn(2, 8, 16) for key in ("x", "y")}
    step = tools.trace(Inlined(style), tools.mse, batch)
    run_passes(step, [*PREPARE, NORMS])
    assert found(step) == {"attention": "found nothing", "rope": "2", "swiglu": "2", "norm": "2"}
    rope = tagged(step, "rope")
    assert [n.target for n in rope[0]].count(aten.mul.Tensor) == [n.target for n in rope[1]].count(aten.mul.Tensor) == 2
    if style == "wide":
        assert all(aten._to_copy.default in [n.target for n in nodes] for nodes in rope)


class NoRotations(nn.Module):
    """What only resembles: halves in their order, thirds, a rotation of another tensor, a square of a SiLU."""

    def __init__(self):
        super().__init__()
        self.cos, self.sin = (nn.Parameter(torch.randn(12)) for _ in range(2))

    def forward(self, x):
        a, b = x.chunk(2, -1)
        c, d, e = x.chunk(3, -1)
        other = torch.cat(x.sin().chunk(2, -1)[::-1], -1)
        unswapped = x * self.cos + torch.cat((a, b), -1) * self.sin
        thirds = x * self.cos + torch.cat((d, e, c), -1) * self.sin
        return unswapped + thirds + (x * self.cos + other * self.sin) + F.silu(x) * F.silu(x)


def test_what_only_resembles_a_region_is_left(tools):
    step = tools.trace(NoRotations(), tools.mse, tools.vectors(6, 12)[0])
    run_passes(step, [NORMS])
    assert found(step)["rope"] == "found nothing" and not tagged(step, "norm")


def test_nothing_found_is_said(tools, compiled):
    step = tools.trace(nn.Linear(12, 12), tools.mse, tools.vectors(6, 12)[0])
    tags, report = run_passes(step, ["tag_regions", get("inductor", mode="regional")])
    expected = "regions: attention found nothing, rope found nothing, swiglu found nothing"
    assert tags.notes == [expected] and "found nothing to do" in tags.line()
    assert report.changed == 0 and "found nothing to do" in report.line()
    assert report.notes == ["no region is tagged: tag_regions, listed before it, looks for them"]
    assert compiled == []


def test_tags_of_earlier_passes_stay_and_count(tools, compiled):
    step = tools.trace(tools.llama(n_layers=1), tools.next_token_loss, tools.tokens()[0])
    norm = [n for n in step.nodes("forward") if n.meta["stepgraph"].path == "norm"]
    mine = Region("mine", "final norm", (("max_fusion_size", 3),))
    tag(norm, mine)
    *_, tags, report = run_passes(step, [*PREPARE, NORMS, *REGIONAL])
    # The addition before the final norm is another one.
    assert tags.notes == ["regions: attention found nothing, rope 4, swiglu 2, norm 6, final norm 1"]
    assert report.matched == tags.matched == 13
    assert {region_of(n) for n in norm} == {mine}
    assert [options.get("max_fusion_size") for _, options in compiled].count(3) == 1


# Gathering


TAGGED = [get("inductor", mode="regional")]
REGIONAL = [get("tag_regions"), *TAGGED]


@pytest.mark.parametrize("memory", ["none", pytest.param("full", marks=pytest.mark.long)])
def test_calling_regions_apart_changes_no_bit(tools, compiled, case, memory):
    """Every way of training there is, its regions called by a stand-in that runs the same operators."""
    passes = configured(memory=memory, norm="inductor", inductor="regional")
    passes = [p for p in passes if p.tier == "exact" or p.name in ("fuse_norm", "inductor")]
    step = tools.check_bitwise(case, passes, steps=3)
    report = next(r for r in step.log if r.name == "inductor")
    if "llama" in case or case in ("tied", "autocast", "hugging face"):
        assert report.changed > 50 and len(compiled) <= 18


def test_backward_regions_compute_again_what_they_read_from_forward_ones(tools, compiled):
    """As on a GPU: no bit changes, and bytes carried fall; of a norm only its input, its result and rstd are left."""

    def apply(step, options, report):
        run_passes(step, ["tag_regions"])
        report.matched, *carried = rematerialize(step, regions=True)
        report.notes.append(carried)

    again = Pass("again", "exact", apply, "regions that compute again", NoOptions())
    for name in ("llama bf16", "hugging face", "llama bf16, master weights, accumulated", "autocast"):
        step = tools.check_bitwise(name, [*PREPARE, NORMS, again, *REGIONAL], steps=3)
        before, after = step.log[-3].notes[0]
        assert step.log[-3].matched >= 6 and after < 0.9 * before
        assert not any("cut into" in note for note in step.log[-1].notes)
        for node in step.nodes("forward"):
            if node.target is aten.silu.default:
                assert {u.meta["stepgraph"].phase for u in node.users} == {"forward"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama bf16, master weights, accumulated", "writes", "dropout", "complex"])
def test_regions_drawn_at_random_change_no_bit(tools, compiled, name, seed):
    """Overlapping, cyclic, writing and drawing random numbers: what cannot be called at once is cut or left out."""
    draw = random.Random(seed)

    def apply(step, options, report):
        nodes = list(step.nodes("forward", "loss", "backward"))
        for i in range(len(nodes) // 6):
            start = draw.randrange(len(nodes))
            window = nodes[start : start + draw.choice((4, 12, 80))]
            tag([n for n in window if draw.random() < 0.4], Region(f"r{i}", "random"))

    tagging = Pass("random regions", "exact", apply, "tags at random", NoOptions())
    step = tools.check_bitwise(name, [tagging, *TAGGED], steps=3)
    report = step.log[-1]
    assert report.changed > 0
    assert any("cut into" in note for note in report.notes) or name != "llama bf16, master weights, accumulated"


def test_a_region_around_an_outside_node_is_cut(tools, compiled):
    def function(x):
        a = x.sin().cos()
        return (torch.cumsum(a, 0) + a).exp()

    step = tools.by_hand(function, torch.randn(8))
    tag([n for n in step.nodes() if n.target is not aten.cumsum.default], Region("around", "test"))
    pieces, notes = gather(step.graph)
    assert [[n.target for n in p.nodes] for p in pieces] == [
        [aten.sin.default, aten.cos.default], [aten.add.Tensor, aten.exp.default],
    ]  # fmt: skip
    assert notes == ["test around waits for itself through nodes outside: cut into 2"]


def test_two_regions_that_wait_for_each_other_are_cut(tools):
    """Each alone would be one call: only together they make a cycle."""

    def function(x, y):
        a, c = x.sin().sin(), y.cos().cos()
        return (a + 1).exp(), (c + 1).tanh()

    step = tools.by_hand(function, torch.randn(8), torch.randn(8))
    sin, sin2, cos, cos2, add, exp, add2, tanh = step.nodes()
    regions = Region("one", "test"), Region("two", "test")
    tag([sin, sin2, add2, tanh], regions[0])  # the later half reads the other region
    tag([cos, cos2, add, exp], regions[1])
    pieces, notes = gather(step.graph)
    step.graph.lint()
    assert [p.region for p in pieces].count(regions[0]) == 1  # whole
    assert [p.nodes for p in pieces if p.region == regions[1]] == [[cos, cos2], [add, exp]]
    assert notes == ["test two waits for itself through nodes outside: cut into 2"]


def test_writes_keep_their_place(tools, compiled):
    """A node outside that writes what a region read before, and reads what it reads after, stays between."""

    def function(x):
        kept = x.clone()
        a = kept.sin()
        kept.mul_(3)
        b = kept.cos()
        return a + b

    step = tools.by_hand(function, torch.randn(8))
    _, sin, mul, cos, add = step.nodes()
    tag([sin, cos, add], Region("r", "test"))
    _, notes = gather(step.graph)
    order = list(step.nodes())
    assert len(notes) == 1 and order.index(sin) < order.index(mul) < order.index(cos)
    for node in step.nodes():
        node.meta.pop("stepgraph_region", None)
    tag([sin, cos, add], Region("r", "test"))
    tools.check_same(step, [torch.randn(8)], TAGGED)


def test_a_region_that_writes_into_what_lies_outside_is_left_to_eager(tools, compiled):
    step = tools.by_hand(lambda x: x.mul_(2).sin() + 1, torch.randn(8))
    tag(list(step.nodes()), Region("r", "test"))
    reports = tools.check_same(step, [torch.randn(8)], TAGGED)
    assert "test r left to eager: mul_ writes into what lies outside" in reports[-1].notes and compiled == []


def test_a_lone_cheap_operator_is_left_to_eager(tools, compiled):
    step = tools.by_hand(lambda x: torch.cumsum(x.sin(), 0).t().cos(), torch.randn(8, 8))
    sin, cumsum, t, cos = step.nodes()
    tag([sin], Region("a", "test"))
    tag([t, cos], Region("b", "test"))
    assert gather(step.graph)[0] == [] and not any(map(region_of, step.graph.nodes))
    tag([cumsum], Region("c", "test"))  # a scan may gain
    assert len(gather(step.graph)[0]) == 1


def test_equal_layers_are_compiled_once(tools, compiled, monkeypatch):
    """Four kinds of rotation, two of gated product, and norms: first, later and last, forward and backward."""
    counts = {}
    for n in (2, 6):
        compiled.clear()
        monkeypatch.setattr(library, "_compiled", {})  # without what other captures of this process compiled
        step = captured(tools, tools.llama(n_layers=n))
        run_passes(step, REGIONAL)
        counts[n] = len(compiled), step.log[-1].changed
    assert counts[2][0] == counts[6][0] == 11
    assert counts[6][1] > 2.5 * counts[2][1]


def test_structures_differ_in_options_values_and_forms(tools, compiled):
    """Only the first two are equal: then another number, its type, a stride, an option, and one input for two."""

    def function(x, y, z):
        pairs = [(x, y), (y, x)]
        results = [torch.sin(a + b) * 2 for a, b in pairs]
        results += [torch.sin(x + y) * 3, torch.sin(x + y) * 2.0, torch.sin(x + z.t()) * 2, torch.sin(x + y) * 2]
        return *results, torch.sin(x + x) * 2

    inputs = [torch.randn(4, 4) for _ in range(3)]
    step = tools.by_hand(function, *inputs)
    nodes = [n for n in step.nodes() if n.target is not aten.t.default]
    for i in range(7):
        tag(nodes[3 * i : 3 * i + 3], Region(f"r{i}", "test", (("max_fusion_size", 7),) if i == 5 else ()))
    tools.check_same(step, inputs, TAGGED)
    assert len(compiled) == 6


def test_results_in_an_order_of_their_own(tools, compiled):
    """Equal operators of which other results are read are two structures."""
    step = tools.by_hand(lambda x: (x.sin().cos(), *(lambda s: (s, s.cos()))(x.sin())), torch.randn(4))
    nodes = list(step.nodes())
    tag(nodes[:2], Region("a", "test"))
    tag(nodes[2:], Region("b", "test"))
    tools.check_same(step, [torch.randn(4)], TAGGED)
    assert len(compiled) == 2


def test_what_runs_can_be_split_again(tools, compiled):
    """As the pass cuda_graph does around nodes that need the host: pieces that share a compiled region run the same."""
    step = captured(tools, tools.llama())
    run_passes(step, REGIONAL)
    host = {n for n in step.executable.graph.nodes if n.target is aten.embedding.default or n.target is aten.mm.default}
    assert len(host) > 20
    inputs = [
        torch.randn(v.shape) if v.is_floating_point() else tools.tokens()[0]["tokens"]
        for v in (n.meta["val"] for n in step.placeholders())
    ]
    module = split(step.executable, lambda node: "host" if node in host else "device")
    assert {piece.group for piece in module.children()} == {"host", "device"}
    for a, b in zip(plain_runner(step)(inputs), Interpreter(module)(inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_deep_models_take_no_time(tools, compiled):
    """Finding, gathering and hashing 82 regions of 8 layers takes four times as long as those of 2; sixteen times if
    it were quadratic."""

    def seconds(layers):
        step = captured(tools, tools.llama(n_layers=layers))
        begin = time.process_time()
        run_passes(step, REGIONAL)
        assert len(step.executable.graph.find_nodes(op="call_module")) == 10 * layers + 2
        return time.process_time() - begin

    few, many = (min(seconds(layers) for _ in range(2)) for layers in (2, 8))
    assert many < 8 * few
