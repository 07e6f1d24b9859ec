"""Memsets of CUDA graphs as kernels: the edges that the driver is asked for, and the kernel as PTX."""

import ctypes
import subprocess
from types import SimpleNamespace

import pytest

from stepgraph.run import memsets


class Driver:
    """A graph of CUDA's driver: the kind and edges of each node. Node 1 is the kernel that fills."""

    def __init__(self, kinds, edges, bytes_):
        self.kinds, self.edges, self.bytes, self.filled = dict(kinds), set(edges), bytes_, {}

    def _list(self, nodes, into, count):
        count._obj.value = len(nodes)
        for i, node in enumerate(nodes if into is not None else ()):
            into[i] = node
        return 0

    def cuGraphGetNodes(self, graph, into, count):
        return self._list(sorted(self.kinds), into, count)

    def cuGraphNodeGetDependencies(self, node, into, count):
        return self._list(sorted(a for a, b in self.edges if b == node.value), into, count)

    def cuGraphNodeGetDependentNodes(self, node, into, count):
        return self._list(sorted(b for a, b in self.edges if a == node.value), into, count)

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.kinds[node.value]
        return 0

    def cuGraphMemsetNodeGetParams(self, node, into):
        fields = {"to": 4096 * node.value, "value": 7, "element": 4, "width": self.bytes // 4, "height": 1}
        for name, value in fields.items():
            setattr(into._obj, name, value)
        return 0

    def cuGraphAddKernelNode(self, into, graph, before, count, kernel):
        into._obj.value = node = max(self.kinds) + 1
        self.kinds[node] = 0
        self.edges |= {(before[i], node) for i in range(count.value)}
        types = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)
        given = kernel._obj.parameters
        values = [ctypes.cast(given[i], ctypes.POINTER(of)).contents.value for i, of in enumerate(types)]
        self.filled[node] = (*values, kernel._obj.grid[0] * kernel._obj.block[0])
        return 0

    def cuGraphAddDependencies(self, graph, before, after, count):
        self.edges.add((before._obj.value, after._obj.value))
        return 0

    def cuGraphDestroyNode(self, node):
        del self.kinds[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}
        return 0


@pytest.fixture
def replaced(monkeypatch):
    def run(driver):
        done = []
        monkeypatch.setattr(memsets, "_library", lambda: driver)
        monkeypatch.setattr(memsets, "_fill", lambda device: 1)
        monkeypatch.setattr(memsets.torch.cuda, "current_device", lambda: 0)
        graph = SimpleNamespace(raw_cuda_graph=lambda: 99, instantiate=lambda: done.append(1))
        count = memsets.memsets_to_kernels(graph)
        assert done == [1]
        return count

    return run


def test_a_kernel_takes_the_place_of_a_memset(replaced):
    """Of two memsets one after the other too; kernels and copies stay."""
    edges = {(2, 3), (5, 3), (3, 4), (4, 6), (2, 5), (4, 7)}
    driver = Driver({2: 0, 3: 2, 4: 2, 5: 1, 6: 0, 7: 0}, edges, 8)
    assert replaced(driver) == 2
    assert driver.kinds == {2: 0, 5: 1, 6: 0, 7: 0, 8: 0, 9: 0}
    assert driver.edges == {(2, 8), (5, 8), (8, 9), (9, 6), (2, 5), (9, 7)}
    assert driver.filled == {8: (3 * 4096, 7, 4, 8, 128), 9: (4 * 4096, 7, 4, 8, 128)}


def test_a_large_memset_stays(replaced):
    driver = Driver({2: 0, 3: 2}, {(2, 3)}, memsets.LARGEST + 4)
    assert replaced(driver) == 0
    assert driver.kinds == {2: 0, 3: 2} and driver.edges == {(2, 3)}


def test_what_the_driver_refuses_is_said(replaced):
    driver = Driver({2: 0, 3: 2}, {(2, 3)}, 4)
    driver.cuGraphAddKernelNode = lambda *_: 1
    with pytest.raises(RuntimeError, match="cuGraphAddKernelNode failed with CUresult 1"):
        replaced(driver)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_is_assembled(target, tmp_path):
    triton = pytest.importorskip("triton")
    source = tmp_path / "fill.ptx"
    source.write_bytes(memsets._PTX.rstrip(b"\0"))
    tool = triton.knobs.nvidia.ptxas_blackwell if target == "sm_100" else triton.knobs.nvidia.ptxas
    subprocess.run([tool.path, f"-arch={target}", source, "-o", tmp_path / "fill.cubin"], check=True)
