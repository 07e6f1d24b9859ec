"""Fake tensors that are made without the dispatcher."""

import pytest
import torch

from stepgraph import compat
from stepgraph.capture.fake import fake_mode


def test_a_fake_tensor_over_a_storage_is_what_the_fake_mode_makes():
    mode, device = fake_mode(), torch.device("cpu")
    with mode:
        whole = torch.empty(6, 4, dtype=torch.bfloat16)
    storage = compat.fake_storage(whole.untyped_storage().nbytes())
    forms = [(0, [6, 4], [4, 1]), (4, [4, 2], [1, 8]), (1, [], [])]
    made = [compat.fake_tensor(mode, device, torch.bfloat16, storage, *form) for form in forms]
    for tensor, (offset, shape, strides) in zip(made, forms, strict=True):
        expected = whole.as_strided(shape, strides, offset)
        assert type(tensor) is type(expected) and tensor.fake_mode is mode and tensor.device == device
        assert vars(tensor) == vars(expected)
        for part in ("dtype", "shape", "requires_grad", "layout"):
            assert getattr(tensor, part) == getattr(expected, part)
        assert (tensor.stride(), tensor.storage_offset()) == (expected.stride(), expected.storage_offset())
        assert tensor.untyped_storage().nbytes() == whole.untyped_storage().nbytes()
        with pytest.raises(RuntimeError, match="data pointer"):
            tensor.data_ptr()
    assert len({compat.storage_key(tensor) for tensor in made}) == 1
    assert torch.mm(made[0], made[1]).shape == (6, 2)
    assert compat.storage_key(made[0].T) == compat.storage_key(made[0])


def test_the_code_of_a_lazy_module_is_there_when_it_is_read_or_called():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, graph.get_attr("one"))))
    module = compat.lazy_graph_module({"one": torch.ones(2)}, graph)
    assert "aten.add.Tensor" in module.code
    assert module(torch.ones(2)).tolist() == [2.0, 2.0]
