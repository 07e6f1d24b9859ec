"""The CUDA backend of one tensor: plans of the functions of `spec` on the Triton kernels.

A call allocates outputs and makes one launch; two if a second one adds up the sums over rows, or a first one finds the
sums of few long rows. ``config`` replaces the configuration that `select` would choose: for tests.
"""

import torch

from stepgraph.kernels.norm.spec import Norm
from stepgraph.kernels.norm.triton import plans
from stepgraph.kernels.norm.triton.backward import backward_kernel
from stepgraph.kernels.norm.triton.config.limits import Config, Hardware, Problem
from stepgraph.kernels.norm.triton.config.select import select
from stepgraph.kernels.norm.triton.forward import forward_kernel, sums_kernel
from stepgraph.kernels.norm.triton.launch import Launch
from stepgraph.kernels.norm.triton.partials import add_slots_kernel
from stepgraph.kernels.norm.triton.plans import Plan, form

Tensor = torch.Tensor
Optional = Tensor | None


def forward_plan(
    norm: Norm, keep_h: bool, config: Config | None,
    x: Tensor, residual: Optional, weight: Optional, bias: Optional,
) -> Plan:  # fmt: skip
    """(x, residual, weight, bias) -> [y, h, mean, rstd]."""
    heads = plans.heads_of(weight)
    loads, stores = (x.element_size(),), (norm.out_dtype.itemsize,)
    if residual is not None:
        loads += (residual.element_size(),)
        stores += (residual.element_size(),) * keep_h
    problem = Problem(
        False, x.numel() // x.shape[-1], x.shape[-1], heads, loads, stores, norm.kind == "layer",
        (weight is not None) + (bias is not None), 0, 2 if weight is None else weight.element_size(),
    )  # fmt: skip
    hw = plans.hardware_of(x)
    x_place, r_place = plans.place_of(x, heads), plans.place_of(residual, heads)
    problem = plans.by_vectors(problem, hw, (x_place,) if residual is None else (x_place, r_place))
    config = config or select(problem, hw)
    if config.programs and config.split == 1 and config.weight != "before":
        raise ValueError(f"weight={config.weight} is for programs of one step, not programs={config.programs}; use 0")
    cover = plans.cover_of(problem, config, hw)
    words = plans.share_words(problem, config, cover)
    numbers = (words, problem.M, *x_place.numbers, *r_place.numbers, float(norm.eps))
    constants = {
        "N": problem.N,
        "H": heads,
        "OFFSET": float(norm.weight_offset),
        "BH": cover.heads,
        "SPLIT": config.split,
        "PERIOD": problem.period,
        "SHIFT": problem.shift,
        "SUM": plans.sum_rows(problem, config, cover.heads),
        "HOLD": plans.held(x if residual is None else residual),
        "HOLD_W": config.hold_weight and plans.held(weight),
        "WEIGHT": config.weight,
        **x_place.constants("X"),
        **r_place.constants("R"),
        **plans.tiles(problem, config),
    }
    ahead = config.split > 1 and config.exchange == "launch"
    if ahead:
        found = plans.launches_ahead(sums_kernel, forward_kernel, numbers, constants, cover.grid, config, hw)
    else:
        found = plans.launches(forward_kernel, numbers, constants, cover.grid, config, config.split > 1, hw)
    shape, rows = x.shape, x.shape[:-1]
    outputs = [
        form(shape, norm.out_dtype),
        None if residual is None else form(shape, residual.dtype, keep_h),
        form(rows, torch.float32, norm.kind == "layer"),
        form(rows, torch.float32),
    ]
    inputs = (x_place, r_place, weight, bias)
    words = words + (cover.groups + 1) // 2 if words else 0
    if ahead:  # a launch of its own writes the words: any memory serves for them
        return Plan(x.device, found, inputs, [*outputs, form((words,), torch.int64)])
    return Plan(x.device, found, inputs, outputs, words)


def _add_launch(problem: Problem, slots: int, hw: Hardware) -> Launch:
    """The second launch, which adds up sums over rows."""
    pitch = plans.pitch_of(problem)
    width, warps = 8 if pitch * problem.sums <= 8192 else 32, 8
    rows = min(1 << (slots - 1).bit_length(), 1024 * warps // width)
    constants = {"PLANES": problem.sums, "ROWS": rows, "WIDTH": width, "DEPENDENT": hw.dependent}
    numbers, programs = (slots, problem.heads * problem.N, pitch), -(-pitch * problem.sums // width)
    return Launch(add_slots_kernel, numbers, constants, programs, warps=warps, dependent=hw.dependent)


def backward_plan(
    norm: Norm, dx_dtype: torch.dtype, need_dx: bool, need_dw: bool, need_db: bool, config: Config | None,
    dy: Tensor, h: Tensor, weight: Optional, dh: Optional,
) -> Plan:  # fmt: skip
    """(dy, h, weight, mean, rstd, dh) -> [dx, dw, db, partial sums over rows]."""
    heads = plans.heads_of(weight)
    loads = (dy.element_size(), h.element_size())
    if dh is not None and need_dx:
        loads += (dh.element_size(),)
    problem = Problem(
        True, h.numel() // h.shape[-1], h.shape[-1], heads, loads, (dx_dtype.itemsize,) * need_dx,
        norm.kind == "layer", int(weight is not None), need_dw + need_db,
        2 if weight is None else weight.element_size(),
    )  # fmt: skip
    hw = plans.hardware_of(h)
    places = plans.place_of(dy, heads), plans.place_of(h, heads), plans.place_of(dh, heads)
    problem = plans.by_vectors(problem, hw, places if len(loads) > 2 else places[:2])
    config = config or select(problem, hw)
    cover = plans.cover_of(problem, config, hw)
    direct = cover.slots == 1 or not problem.sums
    shares = plans.share_words(problem, config, cover) if need_dx else 0
    numbers = (shares, problem.M, *places[0].numbers, *places[1].numbers, *places[2].numbers)
    constants = {
        "N": problem.N,
        "H": heads,
        "OFFSET": float(norm.weight_offset),
        "BH": cover.heads,
        "SPLIT": config.split,
        "PERIOD": problem.period,
        "SHIFT": problem.shift,
        "HOLD_D": plans.held(dy),
        "HOLD_H": plans.held(h),
        "HOLD_W": config.hold_weight and plans.held(weight),
        "STAGES": config.stages,
        "SUM": plans.sum_rows(problem, config, cover.heads),
        "DIRECT": direct,
        **places[0].constants("D"),
        **places[1].constants("H"),
        **places[2].constants("G"),
        **plans.tiles(problem, config),
    }
    partials = 0 if direct else cover.slots * problem.sums * plans.pitch_of(problem)
    return Plan(
        h.device,
        plans.launches(backward_kernel, numbers, constants, cover.grid, config, shares > 0, hw),
        (places[0], places[1], weight, None, None, places[2]),
        [
            form(h.shape, dx_dtype, need_dx),
            None if weight is None else form(weight.shape, weight.dtype, need_dw),
            None if weight is None else form(weight.shape, weight.dtype, need_db),
            form((partials,), torch.float32, partials > 0),
        ],
        shares + (cover.groups + 1) // 2 if shares else 0,
        None if direct else _add_launch(problem, cover.slots, hw),
    )
