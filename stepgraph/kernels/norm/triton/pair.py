"""q and k in one launch: plans of the pair functions of `spec`, on the Triton kernels.

One configuration serves both; programs are divided between them in proportion to their rows.
"""

from typing import Any

import torch

from stepgraph.kernels.norm.spec import Norm
from stepgraph.kernels.norm.triton import plans
from stepgraph.kernels.norm.triton.backward import backward_pair_kernel
from stepgraph.kernels.norm.triton.config.limits import Config, Hardware, Problem
from stepgraph.kernels.norm.triton.config.select import select
from stepgraph.kernels.norm.triton.forward import forward_pair_kernel
from stepgraph.kernels.norm.triton.launch import Launch
from stepgraph.kernels.norm.triton.plans import Cover, Plan, form

Tensor = torch.Tensor
Optional = Tensor | None


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


def forward_pair_plan(norm: Norm, config: Config | None, q: Tensor, k: Tensor, wq: Optional, wk: Optional) -> Plan:
    """(q, k, wq, wk) -> [yq, yk, rstd_q, rstd_k]."""
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
    launch = _launch(forward_pair_kernel, numbers, constants, covers, config)
    return Plan(q.device, [launch], (*places, wq, wk), outputs)


def backward_pair_plan(
    norm: Norm, need_dx: bool, need_dw: bool, config: Config | None,
    dyq: Tensor, dyk: Tensor, q: Tensor, k: Tensor, wq: Optional, wk: Optional,
) -> Plan:  # fmt: skip
    """(dyq, dyk, q, k, wq, wk, rstd_q, rstd_k) -> [dq, dk, dwq, dwk, partial sums of each]; dyk has dyq's dtype."""
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
    launch = _launch(backward_pair_kernel, numbers, constants, covers, config)
    return Plan(q.device, [launch], (*places, wq, wk), outputs, sum(counters))
