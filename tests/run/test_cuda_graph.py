"""What CUDA graphs keep of a batch: its strides. The graphs themselves are tested on a GPU."""

import pytest
import torch

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
