"""What CUDA graphs keep of a batch: its strides. The graphs themselves are tested on a GPU."""

import pytest
import torch
from torch import fx

from stepgraph.compat import FakeTensorMode
from stepgraph.passes.compile.cuda_graph import _host_first
from stepgraph.run.cuda_graph import spanned

WHOLE = torch.arange(2 * 3 * 7.0).view(2, 3, 7)


@pytest.mark.parametrize(
    "tensor",
    [
        WHOLE,
        WHOLE[:, :, 1:],
        WHOLE[:, 1, :-1],
        WHOLE.transpose(0, 2),
        WHOLE[:, :1].expand(2, 5, 7),
        WHOLE.unfold(2, 3, 2),
        WHOLE[1, 2, 3],
        WHOLE[:, :0],
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}",
)
def test_a_copy_of_what_a_tensor_spans_keeps_its_strides(tensor):
    copy = spanned(tensor).clone()
    assert copy.is_contiguous() and copy.untyped_storage().data_ptr() != WHOLE.untyped_storage().data_ptr()
    again = copy.as_strided(tensor.shape, tensor.stride())
    assert again.stride() == tensor.stride() and torch.equal(again, tensor)


def test_what_only_the_host_makes_ends_no_cuda_graph():
    """Numbers that the host draws between a GPU's operators, in their order; what reads the GPU stays."""
    aten, graph = torch.ops.aten, fx.Graph()
    with FakeTensorMode():
        on_gpu, on_host = torch.empty(2, device="cuda"), torch.empty(2)
    x = graph.placeholder("x")
    x.meta["val"] = on_gpu

    def call(value, target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    y = call(on_gpu, aten.neg.default, x)
    drawn = call(on_host, aten.rand.default, [2])
    z = call(on_gpu, aten.neg.default, y)
    more = call(on_host, aten.add.Tensor, drawn, 1)
    second = call(on_host, aten.rand.default, [2])
    read = call(on_host, aten._to_copy.default, z)
    written = call(on_host, aten.add_.Tensor, more, 1)
    third = call(on_host, aten.rand.default, [2])
    graph.output((z, more, second, read, written, third))
    _host_first(graph)
    graph.lint()
    assert list(graph.nodes)[1:-1] == [drawn, more, second, y, z, read, written, third]
