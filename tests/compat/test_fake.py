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


@pytest.mark.parametrize("strides", [(4, 1), (1, 6), (8, 1), (0, 1)])
def test_a_fake_tensor_of_its_own_and_a_detached_one_are_what_the_fake_mode_makes(strides):
    mode = fake_mode()
    with mode:
        expected = torch.empty_strided((6, 4), strides, dtype=torch.bfloat16)
        trained = torch.nn.Parameter(expected[1:])
    made = compat.empty_fake(mode, (6, 4), strides, torch.bfloat16, torch.device("cpu"))
    pairs = [(made, expected), (compat.detached(trained), trained.detach())]
    for found, right in pairs:
        assert type(found) is type(right) and vars(found) == vars(right)
        assert found.untyped_storage().nbytes() == right.untyped_storage().nbytes()
        for part in ("dtype", "shape", "requires_grad", "layout", "device"):
            assert getattr(found, part) == getattr(right, part)
        assert (found.stride(), found.storage_offset()) == (right.stride(), right.storage_offset())
    assert pairs[1][0].untyped_storage()._cdata == trained.untyped_storage()._cdata


def test_torch_asks_for_a_gpu_once_in_a_trace(monkeypatch):
    asked = []
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", asked.append)
    mode, gpu = fake_mode(), torch.device("cuda", 0)
    with compat.gpu_context_once():
        made = [compat.empty_fake(mode, (2,), (1,), torch.float32, gpu) for _ in range(3)]
    assert {tensor.device for tensor in made} == set(asked) == {gpu} and len(asked) == 1
    compat.empty_fake(mode, (2,), (1,), torch.float32, gpu)  # made like the mode's first one
    assert len(asked) == 1
    compat.empty_fake(fake_mode(), (2,), (1,), torch.float32, gpu)
    assert len(asked) > 1


def test_a_fake_tensor_made_like_others_of_its_device_is_what_its_class_makes():
    mode = fake_mode()
    meta = torch.empty_strided((6, 4), (1, 6), dtype=torch.bfloat16, device="meta")
    for _ in range(2):  # the pattern, and one like it
        made, right = (make(mode, meta, torch.device("cpu")) for make in (compat.fake_of, compat.FakeTensor))
        assert type(made) is type(right) and vars(made) == vars(right) and made.device == right.device
        assert torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(right)
        assert (made.shape, made.stride(), made.dtype) == (right.shape, right.stride(), right.dtype)
        assert made.untyped_storage()._cdata == right.untyped_storage()._cdata == meta.untyped_storage()._cdata
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        made.data_ptr()
    other = fake_mode()
    assert compat.fake_of(other, meta, torch.device("cpu")).fake_mode is other
