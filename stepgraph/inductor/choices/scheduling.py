"""Gives mixed-order reductions the tile that a tuning chooses, through Inductor's registry of code generators.

Inductor's choices can fix the launch of most kernels (`handler.Choices.triton_kernel_kwargs`), but not how many rows a
program of a mixed-order reduction takes: that is one setting for a whole graph. So a subclass of the CUDA code
generator is registered that sets it for each kernel. Without active tuning it does what Inductor does.
"""

import functools
from typing import Any

from stepgraph import compat
from stepgraph.inductor.choices.column_sums import finished
from stepgraph.inductor.choices.graph_pass import active
from stepgraph.inductor.choices.nodes import column_sums, cross_a_square, loads_of, shape_of
from stepgraph.inductor.choices.reduction_tuning import Tuning, mixed_tile
from stepgraph.inductor.choices.registers import Tile

parts = compat.inductor()


def launch_of(tile: Tile) -> Any:
    """A tile as Inductor's fixed configuration."""
    config = {"XBLOCK": tile.rows, "num_warps": tile.warps, "num_stages": 1}
    if tile.split:
        config |= {"RSPLIT_SIZE": tile.split, "NUM_STAGES": tile.stages}
    return parts.FixedTritonConfig(config)


class Kernel(parts.TritonKernel):
    """A kernel that keeps its dimension of rows even if its tile is a single row.

    Mixed-order reductions need it, and with a fixed tile torch 2.11 fails to generate other kernels without it.
    """

    def want_no_x_dim(self) -> bool:
        return False


class TritonScheduling(parts.TritonScheduling):
    kernel_type = Kernel
    tile: Tile | None = None

    def codegen_mix_order_reduction(self, node: Any) -> None:
        rules = active()
        static = all(n.is_number for n in parts.MixOrderReduction.get_numel_rnumel(node.node1))
        if rules is None or rules.tuning is None or rules.tuning.tuned or not static:
            return super().codegen_mix_order_reduction(node)
        self.tile = tile_of(rules.tuning, node)
        lines = parts.V.graph.wrapper_code.lines
        before = len(lines)
        try:
            with parts.config.patch("triton.mix_order_reduction_split_size", self.tile.split):
                super().codegen_mix_order_reduction(node)
        finally:
            self.tile = None
        lines[before:] = map(finished, lines[before:])

    def create_kernel_choices(self, features: Any, arguments: list[Any], options: dict[str, Any]) -> list[Any]:
        if self.tile and options.get("mix_order_reduction"):
            options = options | {"fixed_config": launch_of(self.tile)}
        return super().create_kernel_choices(features, arguments, options)


def tile_of(tuning: Tuning, node: Any) -> Tile:
    """Tile of a fused mixed-order reduction."""
    nodes = list(node.get_nodes())
    rows, columns = shape_of(node.node1)
    loads = loads_of(nodes, rows, columns, len(column_sums(nodes, node.node1)))
    return mixed_tile(tuning, rows, columns, loads, node.get_device())


class CUDAScheduling(parts.CUDACombinedScheduling):
    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._triton_scheduling = TritonScheduling(scheduler)


def tell_squares() -> None:
    """From now on Inductor joins sums along rows and along columns of a square too, where a tuning is active, as torch
    2.15 does on its own."""
    mixed = parts.MixOrderReduction
    usual = mixed.has_mix_reduction_orders

    def has_mix_reduction_orders(node1: Any, node2: Any) -> bool:
        rules = active()
        tuned = rules is not None and rules.tuning is not None
        return usual(node1, node2) or (tuned and cross_a_square(node1, node2))

    mixed.has_mix_reduction_orders = staticmethod(has_mix_reduction_orders)


@functools.cache
def register() -> None:
    """From now on Inductor generates CUDA code with `CUDAScheduling` instead of its own class."""
    tell_squares()
    common = parts.common
    common.init_backend_registration()
    usual = common.device_codegens["cuda"]

    def make(scheduler: Any) -> Any:
        own = usual.scheduling(scheduler)
        return CUDAScheduling(scheduler) if type(own) is parts.CUDACombinedScheduling else own

    common.register_backend_for_device(
        "cuda",
        make,
        usual.wrapper_codegen,
        usual.cpp_wrapper_codegen,
        usual.fx_wrapper_codegen,
        common.custom_backend_passes["cuda"],
        common.custom_backend_codegen_configs["cuda"],
    )
