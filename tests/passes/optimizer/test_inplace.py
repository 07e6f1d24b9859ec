"""The optimizer and clipping write in place, except where something still reads the old value."""

import copy
import operator

import pytest
import torch

from stepgraph.capture import phase_of
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.values import Parameter
from stepgraph.passes import run_passes

aten = torch.ops.aten
CLEANUP = ["remove_noop_views", "dedupe_casts", "dead_code"]


def allocated(step):
    """Optimizer-phase nodes that make a tensor of their own, not counting scalars."""
    aliases = Aliases(step.graph)
    return [n for n in step.nodes("optimizer") if aliases.root(n) is n and getattr(n.meta["val"], "ndim", 0) > 0]


@pytest.mark.parametrize("name", ["llama", "autocast", "dropout"])
def test_unfused_adamw_and_clipping_copy_nothing(tools, name):
    step = tools.copied(tools.prepared(name)[1].step)
    before = sum(map(tensor_bytes, allocated(step)))
    gradients = {n.args[0] for n in step.nodes("optimizer") if n.target is aten.mul.Tensor}
    gradients = {n for n in gradients if phase_of(n) == "backward"}
    assert aten.copy_.default in tools.targets(step, "optimizer")
    (report,) = run_passes(step, ["inplace_update"])
    # Left per parameter: the denominator and the step, which the formula needs next to its state.
    parameters = step.placeholders(Parameter)
    after = sum(map(tensor_bytes, allocated(step)))
    size = sum(map(tensor_bytes, parameters))
    assert 2 * size <= after < 2.02 * size < before / 3  # the hundredth: the stacked norms of the gradients
    assert aten.copy_.default not in tools.targets(step, "optimizer")
    scaled = [n for n in step.nodes("optimizer") if n.target is aten.mul.Tensor and n.args[0] in gradients]
    assert gradients and not scaled
    assert report.changed == report.matched - 2 * len(parameters)
    assert "MiB not copied" in report.summary


def foreach_clip(x, y, z):
    """Gradients of several kinds, clipped all at once."""
    grads = [x * 2, y * 3, (z * 4).t()]
    clipped = aten._foreach_mul.Tensor(grads, x.sum())
    return [c + 1 for c in clipped]


def foreach_with_a_reader(x, y, z):
    a, b = x * 2, y * 3
    clipped = aten._foreach_mul.Tensor([a, b], x.sum())
    return [*clipped, a + 1]


def foreach_same_gradient_twice(x, y, z):
    a, b = x * 2, y * 3
    return list(aten._foreach_mul.Tensor([a, b, a], x.sum()))


def foreach_aliases(x, y, z):
    a, b = x * 2, y * 3
    return list(aten._foreach_mul.Tensor([a, b, a.t(), b[1:]], x.sum()))


def foreach_output(x, y, z):
    a, b = x * 2, y * 3
    clipped = aten._foreach_mul.Tensor([a, b], x.sum())
    return [*clipped, a.view(-1)]


def foreach_expanded(x, y, z):
    a, b = x.sum().expand(4, 5), y * 3
    return list(aten._foreach_mul.Tensor([a, b], x.sum()))


def foreach_of_inputs(x, y, z):
    return list(aten._foreach_mul.Tensor([x, y * 3, z], x.sum()))


def foreach_factor_is_a_gradient(x, y, z):
    a = (x * 2).sum()
    return list(aten._foreach_mul.Tensor([a, y * 3], a))


@pytest.mark.parametrize(
    "function, in_place, left",
    [
        (foreach_clip, 3, 0),
        (foreach_with_a_reader, 1, 1),
        (foreach_same_gradient_twice, 1, 2),
        (foreach_aliases, 0, 4),
        (foreach_output, 1, 1),
        (foreach_expanded, 1, 1),
        (foreach_of_inputs, 1, 2),
        (foreach_factor_is_a_gradient, 1, 1),
    ],
)
def test_foreach_clipping(tools, function, in_place, left):
    inputs = [torch.randn(4, 4) for _ in range(3)]
    step = tools.by_hand(function, *inputs, phase="optimizer")
    tools.check_same(step, inputs, ["inplace_update"])
    counts = {n.target: len(n.args[0]) for n in step.nodes() if "foreach" in str(n.target)}
    assert counts.get(aten._foreach_mul_.Tensor, 0) == in_place
    assert counts.get(aten._foreach_mul.Tensor, 0) == left


def chain(x, y, z):
    x.copy_(torch.lerp(x * 0.5, y, 0.1))
    return [y + 1]


def chain_and_a_reader_of_the_new_value(x, y, z):
    new = torch.lerp(x, y, 0.1)
    step = new * z
    x.copy_(new)
    return [step]


def chain_and_a_late_reader_of_the_old_value(x, y, z):
    new = torch.lerp(x, y, 0.1)
    late = x + 1
    x.copy_(new)
    return [late]


def chain_that_reads_the_old_value_twice(x, y, z):
    x.copy_((x * 0.5) + x)
    return [y + 1]


def chain_and_a_late_view_of_the_old_value(x, y, z):
    row = x[0]
    new = x * 0.5
    late = row + 1
    x.copy_(new)
    return [late]


def chain_link_with_another_reader(x, y, z):
    half = x * 0.5
    x.copy_(half + y)
    return [half * 2]


def chain_broadcast(x, y, z):
    x[0].copy_(x[0] * 2)
    x.copy_(x.sum(0) * torch.ones_like(x))
    return [y + 1]


def copy_from_another_input(x, y, z):
    x.copy_(y * 2)
    y.copy_(z * 2)
    return [z + 1]


def dead_and_alive_first_arguments(x, y, z):
    a, b = x * 2, y * 2
    c = a * 3
    d = b * 3
    return [c.neg(), d + b]


def dead_but_also_the_second_argument(x, y, z):
    a = x * 2
    return [torch.addcmul(a, a, a) * y, (x * 3).t() * 2]


def dead_through_a_view(x, y, z):
    a = x * 2
    view = a.view(-1)
    b = a * 3
    return [b.neg(), view.neg()]


def dead_and_returned(x, y, z):
    a = x * 2
    return [a, a * 3]


def another_dtype(x, y, z):
    a = x.bfloat16()
    return [a * y, a.t() * 2]


@pytest.mark.parametrize(
    "function, changed",
    [
        (chain, 1),
        (chain_and_a_reader_of_the_new_value, 1),
        (chain_and_a_late_reader_of_the_old_value, 0),
        (chain_that_reads_the_old_value_twice, 1),  # the sum is written into the product, not into the input
        (chain_and_a_late_view_of_the_old_value, 0),
        (chain_link_with_another_reader, 1),
        (chain_broadcast, 0),
        (copy_from_another_input, 0),
        (dead_and_alive_first_arguments, 2),
        (dead_but_also_the_second_argument, 3),
        (dead_through_a_view, 0),
        (dead_and_returned, 0),
        (another_dtype, 1),
    ],
)
def test_updates_and_hazards(tools, function, changed):
    inputs = [torch.randn(4, 4) for _ in range(3)]
    step = tools.by_hand(function, *inputs, phase="optimizer")
    reports = tools.check_same(step, inputs, ["inplace_update"])
    assert reports[0].changed == changed, step.text()
    again = tools.by_hand(function, *inputs, phase="optimizer")
    tools.check_same(again, inputs, [*CLEANUP, "inplace_update"])


def test_forward_and_backward_are_left_alone(tools):
    step = tools.by_hand(lambda x: (x * 2 * 3 * 4,), torch.randn(4, 4), phase="backward")
    (report,) = run_passes(step, ["inplace_update"])
    assert report.matched == 0 and "found nothing to do" in report.line()


def test_a_gradient_that_two_parameters_share_is_clipped_once_each(tools):
    """Both parameters of ``a + b`` have one gradient; the CUDA form clips it in one operator."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))

        def forward(self, x):
            return (self.a + self.b) * x

    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    eager, model = Sum(), None
    model = copy.deepcopy(eager)
    make = tools.fused_adamw
    optimizer, captured = make(eager), make(model)
    step = tools.trace(model, tools.mse, batch, captured, max_grad_norm=0.1)
    _clip_at_once(step)
    run_passes(step, "exact")
    tools.mse(eager, batch).backward()
    torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
    optimizer.step()
    state = [captured.state[p][key] for p in (model.a, model.b) for key in ("step", "exp_avg", "exp_avg_sq")]
    parameters = [model.a.detach(), model.b.detach()]
    with torch.no_grad():
        step.module(*parameters, *state, torch.tensor(3e-3, dtype=torch.float64), *batch.values())
    assert torch.equal(parameters[0], eager.a) and torch.equal(parameters[1], eager.b)


def _clip_at_once(step):
    """Rewrite the per-tensor clipping that CPUs use into the one operator that CUDA uses."""
    norm = next(n for n in step.nodes("optimizer") if n.target is aten.clamp.default)
    muls = [n for n in norm.users if n.target is aten.mul.Tensor]
    with step.graph.inserting_before(muls[0]):
        at_once = step.graph.call_function(aten._foreach_mul.Tensor, ([m.args[0] for m in muls], norm))
        at_once.meta.update(muls[0].meta, val=[m.meta["val"] for m in muls])
        items = [step.graph.call_function(operator.getitem, (at_once, k)) for k in range(len(muls))]
    for item, mul in zip(items, muls, strict=True):
        item.meta.update(mul.meta)
        mul.replace_all_uses_with(item)
        step.graph.erase_node(mul)
