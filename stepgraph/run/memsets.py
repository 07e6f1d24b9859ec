"""Small memsets of a recorded CUDA graph become kernels.

cuBLASLt clears the four bytes by which its kernels for Hopper share out their tiles, before most products. Between the
kernels of a CUDA graph such a memset costs no time of its own but leaves the GPU idle for 5 us before it and 6 us after
it (H200, CUDA 13): 241 to 313 per step of models of 24 blocks.
A kernel that writes the same bytes takes its place, with the same edges.
"""

import ctypes
import functools
from typing import Any

import torch

#: Bytes up to which a memset becomes a kernel: what is longer is worth a copy engine's time.
LARGEST = 65536

_MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
_THREADS = 128
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 to, .param .u32 value, .param .u32 element, .param .u32 bytes)
{
  .reg .pred %beyond;
  .reg .b32 %i, %n, %v, %part;
  .reg .b64 %at, %offset;
  mov.u32 %i, %ctaid.x;
  mov.u32 %n, %ntid.x;
  mov.u32 %part, %tid.x;
  mad.lo.u32 %i, %i, %n, %part;
  ld.param.u32 %n, [bytes];
  setp.ge.u32 %beyond, %i, %n;
  @%beyond ret;
  ld.param.u32 %n, [element];
  rem.u32 %part, %i, %n;
  shl.b32 %part, %part, 3;
  ld.param.u32 %v, [value];
  shr.u32 %v, %v, %part;
  ld.param.u64 %at, [to];
  cvta.to.global.u64 %at, %at;
  cvt.u64.u32 %offset, %i;
  add.u64 %at, %at, %offset;
  st.global.u8 [%at], %v;
  ret;
}
\0"""

_Node = ctypes.c_void_p


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: ``width`` elements of ``element`` bytes in each of ``height`` rows."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
    )


def memsets_to_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Replace the memsets of up to `LARGEST` bytes in ``graph``, which was made with ``keep_graph=True``, was recorded
    on the current device and not yet replayed; how many there were. Raises ``RuntimeError`` where the driver fails."""
    driver, handle = _Driver(), ctypes.c_void_p(graph.raw_cuda_graph())
    replaced = 0
    for node in driver.nodes("cuGraphGetNodes", handle):
        kind = ctypes.c_int()
        driver("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != _MEMSET:
            continue
        memset = _Memset()
        driver("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
        if memset.height != 1 or not 0 < memset.width * memset.element <= LARGEST:
            continue
        before = driver.nodes("cuGraphNodeGetDependencies", node)
        after = driver.nodes("cuGraphNodeGetDependentNodes", node)
        kernel = driver.fill(handle, before, memset)
        for reader in after:
            driver("cuGraphAddDependencies", handle, ctypes.byref(kernel), ctypes.byref(reader), ctypes.c_size_t(1))
        driver("cuGraphDestroyNode", node)
        replaced += 1
    graph.instantiate()
    return replaced


class _Driver:
    """Calls of CUDA's driver library, each checked."""

    def __init__(self) -> None:
        self.library = _library()

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with CUresult {status} where a CUDA graph's memsets became kernels")

    def nodes(self, name: str, of: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """What the query ``name`` lists."""
        count = ctypes.c_size_t()
        self(name, of, None, ctypes.byref(count))
        found = (_Node * count.value)()
        if count.value:
            self(name, of, found, ctypes.byref(count))
        return [_Node(node) for node in found]

    def fill(self, graph: ctypes.c_void_p, before: list[ctypes.c_void_p], memset: _Memset) -> ctypes.c_void_p:
        """A new kernel node of ``graph``, after ``before``, that writes what ``memset`` does."""
        size = memset.width * memset.element
        values = (ctypes.c_uint64(memset.to), *map(ctypes.c_uint32, (memset.value, memset.element, size)))
        parameters = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
        blocks = (-(-size // _THREADS), 1, 1)
        kernel = _Kernel(_fill(torch.cuda.current_device()), blocks, (_THREADS, 1, 1), 0, parameters, None)
        node = _Node()
        listed = (_Node * len(before))(*before)
        self(
            "cuGraphAddKernelNode",
            ctypes.byref(node),
            graph,
            listed,
            ctypes.c_size_t(len(before)),
            ctypes.byref(kernel),
        )
        return node


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _fill(device: int) -> int:
    """The kernel, loaded into the context of ``device``, which is the current one and stays for the process."""
    driver, module, function = _Driver(), ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), _PTX)
    driver("cuModuleGetFunction", ctypes.byref(function), module, b"fill")
    assert function.value is not None
    return function.value
