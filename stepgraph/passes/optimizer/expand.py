"""Writes clipping and the AdamW update as arithmetic, one chain per parameter, for Inductor to fuse.

Matches: ``_fused_adamw_`` of the optimizer phase, the ``_foreach_mul_`` that clips its gradients, and the
``_foreach_copy_`` that rounds master weights into parameters. Before -> after: three sweeps over the gradients and two
over the state -> one kernel per parameter that reads gradient, moments and weight once and writes them once. What
depends on the step alone is computed once for all parameters, in fp64.
Tier numerics: the clipped gradient is not rounded to its dtype in between. Preconditions: after `inplace_update`,
before `inductor`; worth it only when that compiles the result.
Source: the formula of torch's fused AdamW (Loshchilov and Hutter 2019), evaluated in fp32.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.graph.marks import COMPILE
from stepgraph.graph.provenance import phase_of, provenance, set_provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.contract import PassReport, register

aten = torch.ops.aten


@register(
    "expand_optimizer",
    "numerics",
    after=("inplace_update",),
    serves="inductor",
    needs_cuda=True,
    from_options=lambda options: {} if options.inductor == "full" else None,
    forecast=False,  # the roofline counts the update as one pass over its tensors already
)
def expand_optimizer(step: StepGraph, options: object, report: PassReport) -> None:
    """Write clipping and AdamW as arithmetic that Inductor fuses into one kernel per parameter."""
    updates = [n for n in step.nodes("optimizer") if n.target is aten._fused_adamw_.tensor_lr]
    report.matched = sum(len(update.args[0]) for update in updates)
    for update in updates:
        if update.kwargs["amsgrad"]:
            report.notes.append(f"{update.name} keeps maxima (amsgrad): left to the fused kernel")
            continue
        _Expansion(step, update).write()
        report.changed += len(update.args[0])
    report.summary = (
        f"{report.changed} of {report.matched} parameter updates written out, clipping and rounding with them"
    )


class _Expansion:
    """The expansion of one ``_fused_adamw_`` node."""

    def __init__(self, step: StepGraph, update: fx.Node):
        self.update, self.graph, self.origin = update, update.graph, provenance(update)
        self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, _, self.steps = update.args
        self.options = update.kwargs
        self.rounding = self._rounding()
        names = dict(zip(step.placeholders(), (spec.name for spec in step.inputs), strict=True))
        #: Where each parameter is; of a master weight, the parameter that it is rounded into.
        self.paths = [names[p].rpartition(".")[0] for p in (self.rounding.args[0] if self.rounding else self.params)]

    def _rounding(self) -> fx.Node | None:
        """The ``_foreach_copy_`` that takes these parameters (master weights) as its source."""
        for user in self.params[0].users:
            if user.target is aten._foreach_copy_.default and list(user.args[1]) == list(self.params):
                return user
        return None

    def _call(self, target: Callable, *args: Any, compile: bool = True, **kwargs: Any) -> fx.Node:
        """A new node at the insertion point with its fake value, from where the update came."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.params[0].meta["val"].fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        set_provenance(node, self.origin)
        if compile:
            node.meta[COMPILE] = True
        return node

    def write(self) -> None:
        """Replace the update by arithmetic."""
        sources = [self._before_clip(grad) for grad in self.grads]
        with self.graph.inserting_before(self.update):
            factors = self._factors()
            for i, (param, (grad, scale)) in enumerate(zip(self.params, sources, strict=True)):
                self.origin = provenance(self.update)._replace(path=self.paths[i])
                self._update_one(i, param, grad, scale, factors)
        self.graph.erase_node(self.update)
        if self.rounding is not None:
            self.graph.erase_node(self.rounding)
        for unscaled, (grad, scale) in zip(self.grads, sources, strict=True):
            if scale is not None:
                _leave_unscaled(grad)
            if unscaled is not grad and not unscaled.users:  # the conversion to fp32
                self.graph.erase_node(unscaled)

    def _before_clip(self, grad: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """The gradient itself, and what clips it in place if nothing but this update reads it afterwards."""
        converted = grad.target is aten._to_copy.default and phase_of(grad) == "optimizer"  # to fp32, for the masters
        source = grad.args[0] if converted else grad
        clip = next((u for u in source.users if u.target is aten._foreach_mul_.Tensor), None)
        readers = [u for u in source.users if phase_of(u) in ("optimizer", "output")]
        allowed = {clip, self.update, grad}
        norms = {u for u in readers if u.target in (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default)}
        if clip is None or any(u not in allowed | norms for u in readers):
            return grad, None
        return source, clip.args[1]

    def _factors(self) -> dict[str, Sequence[fx.Node] | fx.Node]:
        """Scalars of every parameter, computed for all at once: fp64, rounded to fp32 at the end."""
        call = lambda target, *args, **kwargs: self._call(target, *args, compile=False, **kwargs)  # noqa: E731
        lr = call(aten._to_copy.default, self.options["lr"], dtype=torch.float64)
        steps = call(aten._to_copy.default, call(aten.stack.default, list(self.steps)), dtype=torch.float64)

        def correction(beta: float) -> fx.Node:
            return call(aten.rsub.Scalar, call(aten.pow.Scalar, beta, steps), 1.0)

        def rounded(node: fx.Node) -> fx.Node:
            return call(aten._to_copy.default, node, dtype=torch.float32)

        def spaced(node: fx.Node) -> list[fx.Node]:
            # Each at a multiple of 16 bytes: what reads them is then of one structure, and compiled once.
            rows = call(aten.repeat.default, call(aten.unsqueeze.default, rounded(node), 1), [1, 4])
            scalars = call(aten.unbind.int, call(aten.select.int, rows, 1, 0))
            return [call(operator.getitem, scalars, i) for i in range(len(self.steps))]

        decay = rounded(call(aten.rsub.Scalar, call(aten.mul.Tensor, lr, self.options["weight_decay"]), 1.0))
        return {
            "step_size": spaced(call(aten.div.Tensor, lr, correction(self.options["beta1"]))),
            "root": spaced(call(aten.sqrt.default, correction(self.options["beta2"]))),
            "decay": decay,
        }

    def _update_one(self, i: int, param: fx.Node, grad: fx.Node, scale: fx.Node | None, factors: dict) -> None:
        call, options = self._call, self.options

        def fp32(node: fx.Node) -> fx.Node:
            same = node.meta["val"].dtype == torch.float32
            return node if same else call(aten._to_copy.default, node, dtype=torch.float32)

        g = fp32(grad)
        if scale is not None:
            g = call(aten.mul.Tensor, g, scale)
        if options["maximize"]:
            g = call(aten.neg.default, g)
        m, v, p = fp32(self.exp_avgs[i]), fp32(self.exp_avg_sqs[i]), fp32(param)
        m = call(aten.add.Tensor, m, call(aten.mul.Tensor, call(aten.sub.Tensor, g, m), 1 - options["beta1"]))
        squares = call(aten.mul.Tensor, call(aten.mul.Tensor, g, g), 1 - options["beta2"])
        v = call(aten.add.Tensor, call(aten.mul.Tensor, v, options["beta2"]), squares)
        root = call(aten.div.Tensor, call(aten.sqrt.default, v), factors["root"][i])
        delta = call(aten.div.Tensor, m, call(aten.add.Tensor, root, options["eps"]))
        decayed = call(aten.mul.Tensor, p, factors["decay"])
        p = call(aten.sub.Tensor, decayed, call(aten.mul.Tensor, delta, factors["step_size"][i]))
        call(aten.copy_.default, self.exp_avgs[i], m)
        call(aten.copy_.default, self.exp_avg_sqs[i], v)
        call(aten.copy_.default, param, p)
        if self.rounding is not None:
            call(aten.copy_.default, self.rounding.args[0][i], p)


def _leave_unscaled(grad: fx.Node) -> None:
    """Take ``grad`` out of the ``_foreach_mul_`` that clips it."""
    clip = next(u for u in grad.users if u.target is aten._foreach_mul_.Tensor)
    rest = [g for g in clip.args[0] if g is not grad]
    if rest:
        clip.update_arg(0, rest)
    else:
        clip.graph.erase_node(clip)
