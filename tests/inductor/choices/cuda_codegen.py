"""What Inductor generates for an H200, without one: its wrapper code, and its kernels compiled for sm_90.

Graphs are traced by AOTAutograd on fake CPU tensors, given fake CUDA tensors for inputs, and lowered with the device's
properties replaced by an H200's. The kernels are loaded as Inductor would, so that its heuristics choose their tiles,
and compiled by Triton and ptxas, which need no GPU.
"""

import contextlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.utils._triton as torch_triton
import triton
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import config, decomposition
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)
Spec = tuple[tuple[int, ...], torch.dtype]


class H200:
    """The properties that Inductor asks for."""

    name = "NVIDIA H200"
    major, minor = 9, 0
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    regs_per_multiprocessor = 65536
    shared_memory_per_block_optin = 232448
    L2_cache_size = 50 << 20
    total_memory = 140 << 30


class Interface(device_interface.CudaInterface):
    class Worker(device_interface.CudaInterface.Worker):
        get_device_properties = staticmethod(lambda device=None: H200)
        current_device = staticmethod(lambda: 0)

    get_device_properties = staticmethod(lambda device=None: H200)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)


class Driver:
    get_current_target = staticmethod(lambda: TARGET)
    get_current_device = staticmethod(lambda: 0)
    get_device_interface = staticmethod(lambda: None)


def forget_what_is_there() -> None:
    for function in vars(torch_triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def an_h200() -> Iterator[None]:
    """Inductor finds an H200."""
    device_interface.get_interface_for_device("cuda")  # torch registers its own first
    forget_what_is_there()
    try:
        with (
            mock.patch.dict(device_interface.device_interfaces, {"cuda": Interface, "cuda:0": Interface}),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: H200),
            mock.patch.object(driver, "_active", Driver(), create=True),
        ):
            yield
    finally:
        forget_what_is_there()


@dataclass
class Kernel:
    """A Triton kernel as Inductor wrote it."""

    name: str
    source: str

    @property
    def mixed(self) -> bool:
        """It reduces along rows and along columns."""
        return "RSPLIT_SIZE" in self.source

    def load(self, folder: Path):
        """The kernel with the launch configurations that Inductor's heuristics choose."""
        path = folder / f"{self.name}.py"
        path.write_text(self.source.replace("triton_helpers.set_driver_to_gpu()", ""))
        spec = importlib.util.spec_from_file_location(self.name, path)
        module = importlib.util.module_from_spec(spec)
        with an_h200(), mock.patch.object(torch.cuda, "is_available", lambda: True):
            spec.loader.exec_module(module)
        return getattr(module, self.name)

    def spilled_bytes(self, folder: Path, capsys) -> int:
        """The fewest bytes that ptxas spills in the configurations that Inductor would time.

        Where registers keep warps out, it also tries a looped reduction with half the loop's block.
        """
        tuner = self.load(folder)
        launches = [(launch.kwargs, launch) for launch in tuner.configs]
        launches += [({**k, "R0_BLOCK": k["R0_BLOCK"] // 2}, launch) for k, launch in launches if "R0_BLOCK" in k]
        return min(self._spilled_bytes(tuner, kwargs, launch, capsys) for kwargs, launch in launches)

    @staticmethod
    def _spilled_bytes(tuner, kwargs: dict, launch, capsys) -> int:
        constants = {**tuner.triton_meta["constants"], **kwargs}
        kinds = {**tuner.triton_meta["signature"], **dict.fromkeys(constants, "constexpr")}
        names = tuner.fn.arg_names
        source = ASTSource(
            tuner.fn,
            {name: kinds[name] for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs=tuner.triton_meta["configs"][0],
        )
        capsys.readouterr()
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = True
            triton.compile(source, TARGET, {"num_warps": launch.num_warps, "num_stages": launch.num_stages})
        return int(re.search(r"(\d+) bytes spill stores", capsys.readouterr().out).group(1))


@dataclass
class Generated:
    wrapper: str
    kernels: list[Kernel]

    @property
    def mixed(self) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.mixed]


def trace(function: Callable, *specs: Spec) -> dict[str, tuple[fx.GraphModule, list[Spec]]]:
    """``"forward"`` and ``"backward"`` of a function of tensors that all require a gradient."""
    graphs = {}

    def keep(direction: str) -> Callable:
        def compiler(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
            graphs[direction] = module, [(tuple(t.shape), t.dtype) for t in inputs]
            return make_boxed_func(module.forward)

        return compiler

    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape, dtype in specs]
        compiled = aot_function(
            function,
            keep("forward"),
            keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decomposition.select_decomp_table(),
        )
        out = compiled(*inputs)
        out.backward(torch.empty_like(out))
    return graphs


def generate(graph: tuple[fx.GraphModule, list[Spec]], backward: bool = True) -> Generated:
    """Inductor's code for a traced graph on an H200, under the settings that are active."""
    module, specs = graph
    module = fx.GraphModule(module, fx.Graph())
    module.graph.output(module.graph.graph_copy(graph[0].graph, {}))
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with fake:
        inputs = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in specs]
    FakeTensorProp(module, fake).propagate_dont_convert_inputs(*inputs)
    DeviceProperties.create.cache_clear()
    with an_h200(), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()), torch.no_grad():
        post_grad_passes(module, is_inference=False)
        lowering = GraphLowering(module, example_inputs=inputs, shape_env=fake.shape_env, is_backward=backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            wrapper = lowering.codegen()[0].value
    found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", wrapper, re.DOTALL)
    return Generated(wrapper, [Kernel(name, source) for name, source in found])


@contextlib.contextmanager
def rules(scope) -> Iterator:
    """A scope of stepgraph.inductor around `generate`, which makes no cache key: the scope would warn of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with scope:
            yield scope


__all__ = ["Generated", "Kernel", "an_h200", "config", "generate", "rules", "trace"]
