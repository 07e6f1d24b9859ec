"""How rules reach Inductor: a subclass of its choices, installed by each compilation in the thread that compiles.

Inductor caches its choices handler per thread and leaves it out of its cache key, and backward is often compiled in one
of autograd's threads. Neither ``V.set_choices_handler`` nor ``config.inductor_choices_class`` reaches such a thread
once it has compiled anything. A custom graph pass does: it runs in every compilation, before lowering, in the
compiling thread, and Inductor makes it part of the cache key. So the pass `Install` carries the rules. The handler
that it installs stays in its thread, and follows the rules of the compilation that runs, if that has any.

Gives mixed-order reductions the tile that a tuning chooses, through Inductor's registry of code generators.

Inductor's choices can fix the launch of most kernels (`Choices.triton_kernel_kwargs`), but not how many rows a
program of a mixed-order reduction takes: that is one setting for a whole graph. So a subclass of the CUDA code
generator is registered that sets it for each kernel. Without active tuning it does what Inductor does.

Column sums of mixed-order reductions, finished in one launch.

A mixed-order reduction of Inductor's leaves one partial column sum per program. Inductor adds them up with torch's sum,
in float32, and casts the result in another kernel: two launches, which on small tensors take a third as long as the
reduction itself. Here a sum that is only read by a cast gets the dtype of the cast, and one kernel adds up the parts.
"""

import functools
import re
from typing import Any

import torch
from torch import fx

import stepgraph.kernels.norm.column_sum  # noqa: F401  (registers the operator that generated code calls)
from stepgraph import compat
from stepgraph.inductor.choices.graph_pass import RulesPass, active
from stepgraph.inductor.choices.nodes import column_sums, cross_a_square, loads_of, shape_of
from stepgraph.inductor.choices.reduction_tuning import Tuning, mixed_tile
from stepgraph.inductor.choices.registers import Tile
from stepgraph.inductor.choices.rules import Rules

aten = torch.ops.aten
parts = compat.inductor()

_VIEWS = (aten.view.default, aten.reshape.default, aten.squeeze.dim)
_NARROW = (torch.bfloat16, torch.float16)
#: ``buf = workspace[start : end].view(parts, columns).sum(dim=0)``, perhaps viewed, perhaps cast.
_FINISH = re.compile(
    r"(\w+) = (\w+\[[^\]]*\]\.view\([^()]*\))\.sum\(dim=0\)(\.view\(\[[^\]]*\]\))?(?:\.to\((torch\.\w+)\))?"
)


def narrow(graph: fx.Graph) -> None:
    """Let a column sum that is only read by a cast to a narrow dtype, and returned so, have that dtype itself: it is
    still added in float32, and rounded once."""
    if parts.config.emulate_precision_casts or not parts.config.triton.codegen_upcast_to_fp32:
        return  # a narrow sum would then round what it adds
    for cast in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
        chain = [cast.args[0]]
        while chain[-1].target in _VIEWS and len(chain[-1].users) == 1:
            chain.append(chain[-1].args[0])
        # Only returned: a value that is also read here Inductor rounds as eager does when it is saved for backward.
        returned = all(user.op == "output" for user in cast.users)
        if returned and cast.args[1] in _NARROW and _sums_columns(chain[-1]):
            chain[-1].kwargs = {"dtype": cast.args[1]}
            for node in chain:
                if "val" in node.meta:
                    node.meta["val"] = node.meta["val"].to(cast.args[1])
            cast.replace_all_uses_with(chain[0])
            graph.erase_node(cast)


def _sums_columns(node: fx.Node) -> bool:
    """Whether the node is a float32 sum over all dimensions but the last, and is read once."""
    if node.target is not aten.sum.dim_IntList or node.kwargs or len(node.users) != 1:
        return False
    added, dims = node.args[0].meta.get("val"), node.args[1]
    if added is None or added.dtype is not torch.float32 or added.ndim < 2 or not dims:
        return False
    return {dim % added.ndim for dim in dims} == set(range(added.ndim - 1))


def finished(line: Any) -> Any:
    """``line`` of generated code; where it adds up the parts of a sum, one kernel does so."""
    found = _FINISH.fullmatch(line) if isinstance(line, str) else None
    if found is None:
        return line
    name, source, view, dtype = found.groups()
    if view is None:  # torch 2.11 drops the dimensions of size 1 that the sum keeps
        view = f".view({[int(size) for size in parts.V.graph.get_buffer(name).get_layout().size]})"
    return f"{name} = torch.ops.stepgraph.column_sum({source}, {dtype or 'torch.float32'}){view}"


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

    def codegen_kernel(self, name: str | None = None) -> str:
        """Hide the bounds of divided positions in a tile from LLVM. Where it knows that they fit in 16 bits, it packs
        two additions to them into one, ptxas (12.8 to 13.0, sm_90) may lose a constant of that, and the kernel reads
        wrong elements. The added term is 0, as there is one program along the third axis; LLVM does not know that."""
        code = super().codegen_kernel(name)
        if re.search(r"r0_index (//|%) ", code) and "tl.program_id(2)" not in code:
            code = code.replace("tl.arange(0, R0_BLOCK)", "256 * tl.program_id(2) + tl.arange(0, R0_BLOCK)")
        return code


class TritonScheduling(parts.TritonScheduling):
    kernel_type = Kernel
    tile: Tile | None = None

    def codegen_mix_order_reduction(self, node: Any) -> None:
        rules = active()
        static = all(n.is_number for n in parts.MixOrderReduction.get_numel_rnumel(node.node1))
        if rules is None or rules.tuning is None or not static:
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


def join_squares() -> None:
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
    join_squares()
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


class Install(RulesPass):
    """Makes the running compilation follow its rules, and finish column sums as `finished` does."""

    def __init__(self, rules: Rules, then: tuple[Any, ...] = ()) -> None:
        super().__init__(rules, then)
        if rules.tuning:
            register()

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.then:
            other(graph)
        handler = type(parts.V.choices)
        if handler is parts.InductorChoices:
            parts.V.set_choices_handler(Choices())
        elif handler is not Choices:
            raise ValueError(
                f"Inductor's choices already belong to {handler.__name__}: stepgraph.inductor can only extend "
                "InductorChoices itself; unset V.set_choices_handler and config.inductor_choices_class"
            )
        if self.rules.tuning:
            narrow(graph)
        self.rules.begin()


class Choices(parts.InductorChoices):
    """Inductor's choices, except where the rules decide."""

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        rules = active()
        return super().can_fuse(scheduler, node1, node2, shared_data_score) and (
            rules is None or rules.can_fuse(scheduler, node1, node2)
        )

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict) -> dict:
        kernel_kwargs = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        rules = active()
        if rules is None:
            return kernel_kwargs
        if kernel_kwargs.get("mix_order_reduction"):
            if rules.guard:
                rules.guard.made.append(frozenset(node.get_name() for node in features.scheduler_nodes()))
        elif rules.tuning and (tile := inner_tile(rules.tuning, features, groups)):
            kernel_kwargs |= {"override_persistent_reduction": True, "fixed_config": launch_of(tile)}
        return kernel_kwargs


def inner_tile(tuning: Tuning, features: Any, groups: list[Any]) -> Tile | None:
    """Tile of whole rows for a kernel that reduces along contiguous rows alone; None leaves it to Inductor."""
    if not features.is_reduction() or not _along_rows(features):
        return None
    if [set(group) for group in groups] != [{"x", "r0_"}] or any(map(features.contains_op, ("scan", "sort"))):
        return None
    if not (features.numel.is_number and features.reduction_numel.is_number):
        return None
    rows, columns = int(features.numel), int(features.reduction_numel)
    return tuning.inner_tile(rows, columns, loads_of(list(features.scheduler_nodes()), rows, columns, 0))


def _along_rows(features: Any) -> bool:
    """Whether a kernel reduces along contiguous rows. Inductor's own hint says so only where all reads and writes of
    its reductions are contiguous: not for a modulated norm, which reads a value per sequence, nor where row statistics
    are padded, as for 1,500 tokens."""
    hint = features.get_reduction_hint()
    if hint != parts.ReductionHint.DEFAULT or features.has_non_contiguous_pw_in_reduction_kernel():
        return hint == parts.ReductionHint.INNER
    reads = [dep for node in features.reduction_nodes() for dep in node.read_writes.reads]
    memory = all(isinstance(dep, parts.MemoryDep) for dep in reads)
    return memory and all(dep.is_contiguous() or dep.stride1_for_last_dim(False) for dep in reads)
