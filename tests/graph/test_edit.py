"""The editing layer: what a new node carries, and what goes when nothing reads it."""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph.kernels.loss.tokens  # noqa: F401  (registers its operators)
from stepgraph.graph import edit
from stepgraph.graph.collectives import ALL_GATHER, WAIT
from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import cast_behind, casts_of, is_cast, is_pointwise, without_casts
from stepgraph.graph.provenance import Provenance, provenance, set_provenance

aten = torch.ops.aten


def traced(function, *inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    for node in module.graph.nodes:
        if node.op == "call_function":
            set_provenance(node, Provenance("block", "forward", "model.py:1", checkpoint=3))
    return module


def find(module: fx.GraphModule, target) -> fx.Node:
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


def last(module: fx.GraphModule) -> fx.Node:
    return module.graph.output_node().args[0][0]


def test_a_new_node_has_place_value_and_provenance_of_what_it_stands_for():
    module = traced(lambda x: [x.sin().cos()], torch.randn(2, 3))
    sin, cos = find(module, aten.sin.default), find(module, aten.cos.default)
    build = Builder(cos, before=cos)
    first = build(aten.mul.Tensor, sin, 2.0)
    second = build(aten._to_copy.default, first, dtype=torch.bfloat16)
    assert [sin.next, first.next, second.next] == [first, second, cos]
    value = second.meta["val"]
    assert (value.shape, value.dtype) == ((2, 3), torch.bfloat16)
    assert value.fake_mode is sin.meta["val"].fake_mode and not value.requires_grad
    assert provenance(second) == provenance(cos) and provenance(second).checkpoint == 3
    build = Builder(cos, after=sin)
    third, fourth = build(aten.neg.default, sin), build(aten.full.default, [2], 1.0)
    assert [sin.next, third.next, fourth.next] == [third, fourth, first]
    module.graph.lint()


def test_nodes_for_several_belong_to_the_module_that_holds_them():
    module = traced(lambda x: [x.sin().cos()], torch.randn(2))
    sin, cos = find(module, aten.sin.default), find(module, aten.cos.default)
    for node, path in ((sin, "blocks.1.attention.q"), (cos, "blocks.1.attention.kv")):
        set_provenance(node, provenance(node)._replace(path=path))
    build = Builder(cos, sin, before=cos)
    both, one = build(aten.neg.default, sin), build(aten.neg.default, sin, like=sin)
    assert provenance(both) == provenance(cos)._replace(path="blocks.1.attention")
    assert provenance(one) == provenance(sin)


def test_values_of_lists_writes_collectives_and_random_numbers():
    module = traced(lambda x: [x.sin()], torch.randn(4, 6))
    (x,) = module.graph.find_nodes(op="placeholder")
    sin = find(module, aten.sin.default)
    build = Builder(sin, after=sin)
    parts = build(aten.split.Tensor, sin, 2)
    assert [part.shape for part in parts.meta["val"]] == [(2, 6), (2, 6)]
    half = build(operator.getitem, parts, 1).meta["val"]
    assert half.untyped_storage()._cdata == sin.meta["val"].untyped_storage()._cdata
    assert build(aten._foreach_mul_.Tensor, [sin], build(aten.sum.default, x)).meta["val"] is None
    gathered = build(WAIT, build(ALL_GATHER, sin, 8, "any group"))
    assert gathered.meta["val"].shape == (32, 6)
    labels = build(aten.argmax.default, sin, 1)
    kept = build(torch.ops.stepgraph.token_stats.default, sin, labels, 1.0, -100).meta["val"]
    assert [value.shape for value in kept] == [(4,)] * 4
    state = torch.get_rng_state()
    assert build(aten.rand_like.default, x).meta["val"].shape == (4, 6)
    assert build(aten.bernoulli.p, x, 0.5).meta["val"].shape == (4, 6)
    assert torch.equal(torch.get_rng_state(), state)


def test_replace_leaves_what_only_the_old_node_read_to_erase_unread():
    module = traced(lambda x: [x.sin().cos().neg()], torch.randn(2))
    sin, cos = find(module, aten.sin.default), find(module, aten.cos.default)
    replace(cos, Builder(cos, before=cos)(aten.tan.default, *module.graph.find_nodes(op="placeholder")))
    assert not sin.users
    assert erase_unread(sin) == 1
    module.graph.lint()
    module.recompile()
    assert torch.equal(module(torch.ones(2))[0], -torch.ones(2).tan())


def test_what_is_read_written_or_random_stays():
    def function(x):
        drawn, kept = torch.rand_like(x), x.cos()
        (drawn * kept).exp()
        x.add_(1)
        return [kept]

    module = traced(function, torch.randn(2))
    count = len(module.graph.nodes)
    assert erase_unread(*module.graph.nodes) == 2  # the product and its exponential
    assert erase_unread(*module.graph.nodes) == 0
    assert len(module.graph.nodes) == count - 2
    find(module, aten.rand_like.default), find(module, aten.cos.default), find(module, aten.add_.Tensor)


def test_collectives_go_where_asked():
    module = traced(lambda x: [x + 1], torch.randn(2))
    add = find(module, aten.add.Tensor)
    build = Builder(add, before=add)
    (x,) = module.graph.find_nodes(op="placeholder")
    wait = build(WAIT, build(ALL_GATHER, build(aten.neg.default, x), 2, "any group"))
    assert erase_unread(wait) == 0
    assert erase_unread(wait, collectives=True) == 3


@pytest.mark.parametrize(
    "function, casts",
    [
        (lambda x: x.bfloat16().double(), 2),
        (lambda x: x.sin(), 0),
        (lambda x: x.to(torch.float8_e4m3fn), 0),
        (lambda x: x.to(torch.int64), 0),
        (lambda x: x.to("meta"), 0),
        (lambda x: x.view(4, 1), 0),
    ],
)
def test_casts_are_between_floating_point_dtypes_of_two_bytes_or_more(function, casts):
    module = traced(lambda x: [function(x.sin())], torch.randn(4))
    node = last(module)
    assert is_cast(node) == bool(casts) and len(casts_of(node)) == casts
    assert without_casts(node) is (find(module, aten.sin.default) if casts else node)


def test_the_cast_behind_a_node_alone_reads_it():
    module = traced(lambda x: [x.sin().bfloat16()], torch.randn(4))
    assert cast_behind(find(module, aten.sin.default)) is last(module)
    module = traced(lambda x: [(y := x.sin()).bfloat16(), y + 1], torch.randn(4))
    assert cast_behind(find(module, aten.sin.default)) is None


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x + 1, True),
        (lambda x: x.bfloat16(), True),
        (lambda x: x.clone(), True),
        (lambda x: x.t(), False),
        (lambda x: x.sum(0), False),
        (lambda x: x @ x, False),
    ],
)
def test_pointwise_operators_compute_each_element_from_its_place(function, expected):
    assert is_pointwise(last(traced(lambda x: [function(x)], torch.randn(4, 4)))) == expected


def test_equal_calls_are_evaluated_once_and_give_tensors_of_their_own(monkeypatch):
    evaluated, form = [], edit._form_of_made
    monkeypatch.setattr(edit, "_form_of_made", lambda *given: evaluated.append(given) or form(*given))
    module = traced(lambda x: [x.sin().cos()], torch.randn(4, 6))
    x, cos = next(iter(module.graph.nodes)), find(module, aten.cos.default)
    build = Builder(cos, before=cos)
    calls = {
        "new": lambda: build(aten.mul.Tensor, x, 2.0),
        "other number": lambda: build(aten.mul.Tensor, x, 2),
        "several": lambda: build(aten.topk.default, x, 2),
        "padded": lambda: build(aten.new_empty_strided.default, x, [4, 6], [8, 1]),
        "view": lambda: build(aten.t.default, x),
        "itself": lambda: build(aten._to_copy.default, x),
        "of another layout": lambda: build(aten.mul.Tensor, build.view(x, [24]), 2.0),
    }
    for name, call in calls.items():
        first, done = call().meta["val"], len(evaluated)
        second = call().meta["val"]
        pairs = list(zip(first, second, strict=True)) if isinstance(first, tuple) else [(first, second)]
        for one, other in pairs:
            assert one is not other and one.fake_mode is other.fake_mode
            assert (one.shape, one.stride(), one.dtype, one.device) == (
                other.shape, other.stride(), other.dtype, other.device,
            )  # fmt: skip
            shared = one.untyped_storage()._cdata == other.untyped_storage()._cdata
            assert shared == (name == "view")
        assert len(evaluated) == done, name


def test_equal_views_are_evaluated_once_and_lie_in_their_own_argument(monkeypatch):
    module = traced(lambda x: [x.sin().cos()], torch.randn(4, 6))
    x, cos = next(iter(module.graph.nodes)), find(module, aten.cos.default)
    build = Builder(cos, before=cos)
    rows = [build(aten.slice.Tensor, source, 0, start, start + 2) for source in (x, cos.args[0]) for start in (0, 2)]
    views = {
        "alike": lambda part: build(aten.view.default, part, [12]),
        "turned": lambda part: build(aten.t.default, part),
        "several": lambda part: build(aten.split_with_sizes.default, part, [1, 1]),
        "other bits": lambda part: build(aten.view.dtype, part, torch.int32),
    }
    for view in views.values():
        made = [view(part).meta["val"] for part in rows]
        with monkeypatch.context() as plain:
            plain.setattr(edit, "_KNOWN", {})
            expected = [view(part).meta["val"] for part in rows]
        for part, found, right in zip(rows, made, expected, strict=True):
            assert type(found) is type(right)
            pairs = zip(found, right, strict=True) if isinstance(found, (list, tuple)) else [(found, right)]
            for one, other in pairs:
                assert one.untyped_storage()._cdata == part.meta["val"].untyped_storage()._cdata
                assert (one.shape, one.stride(), one.storage_offset()) == (
                    other.shape, other.stride(), other.storage_offset(),
                )  # fmt: skip
                assert (one.dtype, one.device) == (other.dtype, other.device)


def test_views_of_tiles_and_sums_over_tiles_are_evaluated_once(monkeypatch):
    module = traced(lambda x: [x.sin().cos()], torch.randn(4, 4))
    x, cos = next(iter(module.graph.nodes)), find(module, aten.cos.default)
    build, ran = Builder(cos, before=cos), []
    tiles = [build(aten.slice.Tensor, x, 0, start, start + 2) for start in (0, 2)]
    totals = [build(aten.mm.default, x, x) for _ in range(2)]
    calls = {
        "view": lambda i: build(aten.t.default, tiles[i]),
        "out": lambda i: build(aten.addmm.out, totals[0], x, x, out=totals[i]),
        "in place": lambda i: build(aten.add_.Tensor, totals[i], x),
    }
    for name, call in calls.items():
        first = call(0).meta["val"]
        dispatch = first.fake_mode.dispatch
        with monkeypatch.context() as counted:
            counted.setattr(first.fake_mode, "dispatch", lambda *given, run=dispatch: ran.append(given) or run(*given))
            second = call(1).meta["val"]
        assert not ran, name
        assert (first.shape, first.stride()) == (second.shape, second.stride())
        if name == "view":
            assert (first.storage_offset(), second.storage_offset()) == (0, 8)
        else:
            assert first is totals[0].meta["val"] and second is totals[1].meta["val"], name


def test_a_write_that_changes_the_form_of_its_argument_is_evaluated_each_time():
    module = traced(lambda x: [x.sin().cos()], torch.randn(4, 6))
    x, cos = next(iter(module.graph.nodes)), find(module, aten.cos.default)
    build = Builder(cos, before=cos)
    for _ in range(2):
        turned = build(aten.t_.default, build(aten.clone.default, x))
        assert turned.meta["val"].shape == (6, 4)


def test_values_that_are_known_are_not_taken_for_others():
    """A fake tensor of known values may give another result than one of its form alone."""
    module = traced(lambda x: [x.sin().cos()], torch.randn(2))
    x, cos = next(iter(module.graph.nodes)), find(module, aten.cos.default)
    build = Builder(cos, before=cos)
    build(aten.neg.default, x)
    known = build(aten.neg.default, x)
    known.meta["val"].constant = torch.ones(2)
    with pytest.raises(TypeError):
        edit._form(known.meta["val"])
    assert build(aten.neg.default, known).meta["val"].shape == (2,)
