"""Writes clipping and the update of AdamW or Adam as arithmetic, one chain per parameter, for Inductor to fuse.

Matches: ``_fused_adamw_`` and ``_fused_adam_`` of the optimizer phase, the ``_foreach_mul_`` that clips its gradients,
and the ``_foreach_copy_`` that rounds master weights into parameters. Before -> after: three sweeps over the gradients
and two over the state -> one kernel per parameter that reads gradient, moments and weight once and writes them once.
What depends only on the step is computed once for all parameters, in fp64. An update that may be left out
(``found_inf``) selects between the old and the new value before it writes. Small parameters, where there are several,
stay with the fused operator, which updates dozens in one launch: a kernel for each would take longer to start than to
run.
Tier numerics: the clipped gradient is not rounded to its dtype in between. Preconditions: after `inplace_update`,
before `inductor`; worth it only when that compiles the result. `fuse_updates` takes updates by other operators.
Source: the formula of torch's fused AdamW (Loshchilov and Hutter 2019) and Adam, evaluated in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph.graph.aliases import written_arguments
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import is_cast, is_mutating
from stepgraph.graph.marks import COMPILE
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.values import Parameter
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten
_UPDATES = (aten._fused_adamw_.tensor_lr, aten._fused_adam_.tensor_lr)
_NORMS = (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default)


@dataclass(frozen=True)
class ExpandOptions:
    """``small``: elements up to which a parameter stays with the fused operator, if at least ``several`` parameters of
    a step are that small. The limits are estimates: one multiprocessor updates each such parameter."""

    small: int = 1 << 14
    several: int = 8


@register(
    "expand_optimizer",
    "numerics",
    options=ExpandOptions(),
    after=("inplace_update",),
    serves="inductor",
    needs_cuda=True,
    from_options=lambda options: {} if options.inductor == "full" else None,
    forecast=False,  # the roofline counts the update as one pass over its tensors already
)
def expand_optimizer(step: StepGraph, options: ExpandOptions, report: PassReport) -> None:
    """Write clipping and fused AdamW or Adam as arithmetic that Inductor fuses into one kernel per parameter."""
    updates = [n for n in step.nodes("optimizer") if n.target in _UPDATES]
    report.matched = sum(len(update.args[0]) for update in updates)
    for update in [update for update in updates if update.kwargs["amsgrad"]]:
        report.notes.append(f"{update.name} keeps maxima (amsgrad): left to the fused kernel")
        updates.remove(update)
    # Counted over all updates: in parts (`offload_optimizer`) they have the bits of one.
    small = {u: {i for i, p in enumerate(u.args[0]) if p.meta["val"].numel() <= options.small} for u in updates}
    together = sum(map(len, small.values()))
    if together < options.several:
        small, together = {update: set() for update in updates}, 0
    for update in updates:
        report.changed += len(update.args[0]) - len(small[update])
        _Expansion(step, update).write(small[update])
    report.summary = f"{report.changed} of {report.matched} parameter updates expanded, with clipping and rounding"
    if together:
        report.summary += f", {together} small ones updated together by the fused kernel"


class _Compiled(Builder):
    """Adds nodes that Inductor compiles, for the update of the parameter of the module ``path``."""

    def __init__(self, update: fx.Node, path: str):
        super().__init__(update, before=update, mark=COMPILE)
        self.origin = self.origin._replace(path=path)

    def value_of(self, node: fx.Node) -> Any:
        """What is written in place gives its argument back."""
        return written_arguments(node)[0].meta["val"] if is_mutating(node) else super().value_of(node)


class _Expansion:
    """The expansion of one ``_fused_adamw_`` or ``_fused_adam_`` node."""

    def __init__(self, step: StepGraph, update: fx.Node):
        self.update, self.options = update, update.kwargs
        self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, _, self.steps = update.args
        self.decoupled = update.target is aten._fused_adamw_.tensor_lr
        self.rounding = self._rounding()
        modules = {node: what.module for node, what in step.bound() if isinstance(what, Parameter)}
        #: Where each parameter is; of a master weight, the parameter that it is rounded into.
        self.paths = [modules[p] for p in (self.rounding.args[0] if self.rounding else self.params)]

    def _rounding(self) -> fx.Node | None:
        """The ``_foreach_copy_`` that takes these parameters (master weights) as its source."""
        for user in _readers_of_kept(self.params[0]):
            if user.target is aten._foreach_copy_.default and list(map(_kept, user.args[1])) == list(self.params):
                return user
        return None

    def write(self, stay: set[int]) -> None:
        """Replace the update by arithmetic, except those at the places ``stay``."""
        places = [i for i in range(len(self.params)) if i not in stay]
        sources = {i: self._before_clip(self.grads[i]) for i in places}
        factors = self._factors() if places else {}
        for i, (grad, clip) in sources.items():
            self._update_one(i, grad, clip.args[1] if clip else None, factors)
        for node in filter(None, (self.update, self.rounding)):
            gone = [tensors[i] for tensors in node.args if tensors for i in places]
            node.args = tuple([tensors[i] for i in sorted(stay)] if tensors else tensors for tensors in node.args)
            if not stay:
                node.graph.erase_node(node)
            if node is self.rounding:
                erase_unread(*(one for one in gone if one not in self.params))
        unscaled: dict[fx.Node, set[fx.Node]] = {}
        for grad, clip in sources.values():
            if clip is not None:
                unscaled.setdefault(clip, set()).add(grad)
        for clip, grads in unscaled.items():
            leave_unscaled(grads, clip)
        erase_unread(*(self.grads[i] for i in places if is_cast(self.grads[i])))

    def _before_clip(self, grad: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """The gradient itself, and what clips it in place if nothing but this update reads it afterwards."""
        converted = is_cast(grad) and phase_of(grad) == "optimizer"  # to fp32, for the masters
        source = grad.args[0] if converted else grad
        clip = next((u for u in source.users if u.target is aten._foreach_mul_.Tensor), None)
        known = (clip, self.update, grad)
        others = [u for u in source.users if phase_of(u) in ("optimizer", "output") and u not in known]
        if clip is None or any(u.target not in _NORMS for u in others):
            return grad, None
        return source, clip

    def _factors(self) -> dict[str, Any]:
        """Scalars of every parameter, computed for all at once: fp64, rounded to fp32 at the end."""
        build, options = Builder(self.update, before=self.update), self.options
        lr = build(aten._to_copy.default, options["lr"], dtype=torch.float64)
        steps = build(aten._to_copy.default, build(aten.stack.default, list(self.steps)), dtype=torch.float64)

        def correction(beta: float) -> fx.Node:
            return build(aten.rsub.Scalar, build(aten.pow.Scalar, beta, steps), 1.0)

        def rounded(node: fx.Node) -> fx.Node:
            return build(aten._to_copy.default, node, dtype=torch.float32)

        def spaced(node: fx.Node) -> list[fx.Node]:
            # Each at a multiple of 16 bytes: what reads them is then of one structure, and compiled once.
            rows = build(aten.repeat.default, build(aten.unsqueeze.default, rounded(node), 1), [1, 4])
            scalars = build(aten.unbind.int, build(aten.select.int, rows, 1, 0))
            return build.parts(scalars)

        skip = options.get("found_inf")
        factors = {
            "skip": skip and build(aten.ne.Scalar, skip, 0),
            "step_size": spaced(build(aten.div.Tensor, lr, correction(options["beta1"]))),
            "root": spaced(build(aten.sqrt.default, correction(options["beta2"]))),
        }
        if self.decoupled:
            decay = build(aten.rsub.Scalar, build(aten.mul.Tensor, lr, options["weight_decay"]), 1.0)
            factors["decay"] = rounded(decay)
        return factors

    def _update_one(self, i: int, grad: fx.Node, scale: fx.Node | None, factors: dict[str, Any]) -> None:
        build, options = _Compiled(self.update, self.paths[i]), self.options
        state = self.exp_avgs[i], self.exp_avg_sqs[i], self.params[i]
        g = build.cast(grad, torch.float32)
        if scale is not None:
            g = build(aten.mul.Tensor, g, scale)
        if options["maximize"]:
            g = build(aten.neg.default, g)
        m, v, p = (build.cast(node, torch.float32) for node in state)
        if not self.decoupled and options["weight_decay"] != 0:
            g = build(aten.add.Tensor, g, build(aten.mul.Tensor, p, options["weight_decay"]))
        m = build(aten.add.Tensor, m, build(aten.mul.Tensor, build(aten.sub.Tensor, g, m), 1 - options["beta1"]))
        squares = build(aten.mul.Tensor, build(aten.mul.Tensor, g, g), 1 - options["beta2"])
        v = build(aten.add.Tensor, build(aten.mul.Tensor, v, options["beta2"]), squares)
        root = build(aten.div.Tensor, build(aten.sqrt.default, v), factors["root"][i])
        delta = build(aten.div.Tensor, m, build(aten.add.Tensor, root, options["eps"]))
        if self.decoupled:
            p = build(aten.mul.Tensor, p, factors["decay"])
        p = build(aten.sub.Tensor, p, build(aten.mul.Tensor, delta, factors["step_size"][i]))
        results = [*zip(state, (m, v, p), strict=True)]
        if self.rounding is not None:
            results.append((self.rounding.args[0][i], p))
        for old, new in results:
            if factors["skip"] is not None:
                new = build(aten.where.self, factors["skip"], old, new)
            build(aten.copy_.default, old, new)


def _kept(source: fx.Node) -> fx.Node:
    """What is written where the update is not left out: of ``where(skip, old, new)`` the new."""
    return source.args[2] if source.target is aten.where.self else source


def _readers_of_kept(node: fx.Node) -> list[fx.Node]:
    """The readers of ``node``, and the readers of the node that keeps the old value where the update is left out."""
    return [reader for user in node.users for reader in (user.users if user.target is aten.where.self else [user])]


def leave_unscaled(grads: set[fx.Node], clip: fx.Node) -> None:
    """Take ``grads`` out of the ``_foreach_mul_`` that clips them: all at once, since each change reads its list."""
    rest = [g for g in clip.args[0] if g not in grads]
    if rest:
        clip.update_arg(0, rest)
    else:
        clip.graph.erase_node(clip)
