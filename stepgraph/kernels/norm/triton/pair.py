"""q and k in one launch: the pair functions of the contract in `spec`, on the Triton kernels.

One configuration serves both; programs are divided between them in proportion to their rows.
"""

from typing import Any, NamedTuple

import torch

from stepgraph.kernels.norm.spec import Norm, check_pair
from stepgraph.kernels.norm.triton import plans
from stepgraph.kernels.norm.triton.backward import backward_pair_kernel
from stepgraph.kernels.norm.triton.config.limits import Config, Hardware, Problem
from stepgraph.kernels.norm.triton.config.select import select
from stepgraph.kernels.norm.triton.forward import forward_pair_kernel
from stepgraph.kernels.norm.triton.launch import INTERPRETED, Launch, current_device, current_stream
from stepgraph.kernels.norm.triton.plans import Cover, Form, Place, allocate, form, layout
from stepgraph.kernels.norm.triton.workspace import zeros

Tensor = torch.Tensor
Optional = Tensor | None

PLANS = plans.Plans()


class PairPlan(NamedTuple):
    """The plan of a pair, forward or backward, for one layout of its inputs."""

    launch: Launch
    places: tuple[Place, ...]
    outputs: tuple[Form, ...]
    words: int = 0


def _problem(x: Tensor, weight: Optional, loads: tuple[int, ...], stores: tuple[int, ...], sums: int | None) -> Problem:
    """The problem of q alone or k alone; ``sums`` is None in forward."""
    n = x.shape[-1]
    heads = plans.heads_of(weight)
    backward = sums is not None
    size = 2 if weight is None else weight.element_size()
    weights = int(weight is not None)
    return Problem(backward, x.numel() // n, n, heads, loads, stores, False, weights, sums or 0, size)


def _covers(
    problems: tuple[Problem, Problem], config: Config | None, hw: Hardware
) -> tuple[Config, tuple[Cover, Cover]]:
    total = problems[0].M + problems[1].M
    if config is None:
        both = problems[0]._replace(M=total, heads=max(problem.heads for problem in problems))
        config = select(both, hw, alone=False)
    parts = (hw._replace(processors=max(1, hw.processors * problem.M // total)) for problem in problems)
    q, k = (plans.cover_of(problem, config, part) for problem, part in zip(problems, parts, strict=True))
    return config, (q, k)


def _constants(
    norm: Norm, problems: tuple[Problem, Problem], config: Config, covers: tuple[Cover, Cover], wq: Optional
) -> dict[str, Any]:
    q, k = problems
    return {
        "N": q.N,
        "HQ": q.heads,
        "HK": k.heads,
        "OFFSET": float(norm.weight_offset),
        "BHQ": covers[0].heads,
        "BHK": covers[1].heads,
        "SUM_Q": plans.sum_rows(problems[0], config, covers[0].heads),
        "SUM_K": plans.sum_rows(problems[1], config, covers[1].heads),
        "HOLD_W": config.hold_weight and plans.held(wq),
        **plans.tiles(q if q.M > k.M else k, config),
    }


def _launch(kernel: Any, numbers: tuple, constants: dict, covers: tuple[Cover, Cover], config: Config) -> Launch:
    grid = covers[0].grid + covers[1].grid
    return Launch(kernel, numbers, constants, grid, warps=config.warps, registers=config.registers)


def _forward_plan(norm: Norm, q: Tensor, k: Tensor, wq: Optional, wk: Optional, config: Config | None) -> PairPlan:
    check_pair(norm, q, k, wq, wk)
    sizes = (q.element_size(),), (norm.out_dtype.itemsize,)
    problems = _problem(q, wq, *sizes, None), _problem(k, wk, *sizes, None)
    config, covers = _covers(problems, config, plans.hardware_of(q))
    places = tuple(plans.place_of(x, p.heads) for x, p in zip((q, k), problems, strict=True))
    constants = {
        "HOLD": plans.held(q),
        **_constants(norm, problems, config, covers, wq),
        **places[0].constants("Q"),
        **places[1].constants("K"),
    }
    strides = (number for place in places for number in place.numbers)
    numbers = (problems[0].M, problems[1].M, *strides, covers[0].grid, float(norm.eps))
    outputs = [form(x.shape, norm.out_dtype) for x in (q, k)] + [form(x.shape[:-1], torch.float32) for x in (q, k)]
    return PairPlan(_launch(forward_pair_kernel, numbers, constants, covers, config), places, tuple(outputs))


def forward_pair(
    norm: Norm, q: Tensor, k: Tensor, wq: Optional, wk: Optional, *, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(yq, yk, rstd_q, rstd_k)`` as the contract in `spec` says. Raises ``ValueError`` as `check_pair` does."""
    device = q.device
    if not INTERPRETED and device.index != current_device():
        with torch.cuda.device(device):
            return forward_pair(norm, q, k, wq, wk, config=config)
    key = (norm, layout(q), layout(k), layout(wq), layout(wk), config)
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS.make(key, _forward_plan, norm, q, k, wq, wk, config)
    yq, yk, rstd_q, rstd_k = allocate(plan.outputs)
    q, k = (place.ready(x) for place, x in zip(plan.places, (q, k), strict=True))
    plan.launch(current_stream(device), q, k, plans.dense(wq), plans.dense(wk), yq, yk, rstd_q, rstd_k)
    return yq, yk, rstd_q, rstd_k


def _backward_plan(
    norm: Norm, dyq: Tensor, dyk: Tensor, q: Tensor, k: Tensor, wq: Optional, wk: Optional,
    need_dx: bool, need_dw: bool, config: Config | None,
) -> PairPlan:  # fmt: skip
    sizes = (dyq.element_size(), q.element_size()), (q.element_size(),) * need_dx
    problems = _problem(q, wq, *sizes, int(need_dw)), _problem(k, wk, *sizes, int(need_dw))
    config, covers = _covers(problems, config, plans.hardware_of(q))
    places = tuple(plans.place_of(x, p.heads) for x, p in zip((dyq, dyk, q, k), problems * 2, strict=True))
    ways = ["tree" if need_dw and cover.slots > 1 else "direct" for cover in covers]
    constants = {
        "HOLD_D": plans.held(dyq),
        "HOLD_H": plans.held(q),
        "STAGES": config.stages,
        "FINISH_Q": ways[0],
        "FINISH_K": ways[1],
        "SUM_WIDTH": plans.sum_tile("tree", config, covers[0], 0)["SUM_WIDTH"],
        **_constants(norm, problems, config, covers, wq),
    }
    for name, place in zip(("DQ", "DK", "Q", "K"), places, strict=True):
        constants |= place.constants(name)
    counters = [(plans.counters_of(way, cover) + 1) // 2 for way, cover in zip(ways, covers, strict=True)]
    strides = (number for place in places for number in place.numbers)
    numbers = (counters[0], problems[0].M, problems[1].M, *strides, covers[0].grid)
    partials = [plans.partials_of(*each) for each in zip(problems, ways, covers, strict=True)]
    outputs = [form(x.shape, x.dtype, need_dx) for x in (q, k)]
    outputs += [None if w is None else form(w.shape, w.dtype, need_dw) for w in (wq, wk)]
    outputs += [form((n,), torch.float32, n > 0) for n in partials]
    return PairPlan(
        _launch(backward_pair_kernel, numbers, constants, covers, config), places, tuple(outputs), sum(counters)
    )


def backward_pair(
    norm: Norm,
    dyq: Tensor,
    dyk: Tensor,
    q: Tensor,
    k: Tensor,
    wq: Optional,
    wk: Optional,
    rstd_q: Tensor,
    rstd_k: Tensor,
    need_dx: bool,
    need_dw: bool,
    *,
    config: Config | None = None,
) -> tuple[Optional, Optional, Optional, Optional]:
    """``(dq, dk, dwq, dwk)`` as the contract in `spec` says."""
    if not (need_dx or need_dw):
        return None, None, None, None
    device = q.device
    if not INTERPRETED and device.index != current_device():
        with torch.cuda.device(device):
            return backward_pair(norm, dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, need_dx, need_dw, config=config)
    if dyk.dtype != dyq.dtype:
        dyk = dyk.to(dyq.dtype)
    inputs = (dyq, dyk, q, k)
    key = (norm, *map(layout, inputs), layout(wq), layout(wk), need_dx, need_dw, config)
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS.make(key, _backward_plan, norm, *inputs, wq, wk, need_dx, need_dw, config)
    dq, dk, dwq, dwk, *partials = allocate(plan.outputs)
    stream = current_stream(device)
    words = zeros(device, stream, plan.words) if plan.words else None
    ready = [place.ready(x) for place, x in zip(plan.places, inputs, strict=True)]
    plan.launch(stream, *ready, plans.dense(wq), plans.dense(wk), rstd_q, rstd_k, dq, dk, dwq, dwk, *partials, words)
    return dq, dk, dwq, dwk
