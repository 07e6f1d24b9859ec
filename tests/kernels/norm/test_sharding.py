"""DTensor: two gloo ranks compare with one rank."""

import pytest
import torch

from tests.distributed.ranks import on_ranks

RANKS = 2


def check_rows(mesh, dim, norm_name, residual, per_head=False):
    """Shard dimension ``dim`` of x; compare outputs and gradients with those of whole tensors."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    from stepgraph.kernels import layer_norm, rms_norm
    from tests.kernels.norm.cases import rows

    norm = rms_norm if norm_name == "rms" else layer_norm
    shape, weight_shape = (3, 4, 16), (4, 16) if per_head else (16,)
    whole = [rows(*shape, grad=True), rows(*weight_shape, seed=1, grad=True), rows(*weight_shape, seed=2, grad=True)]
    whole.append(rows(*shape, seed=3, grad=True) if residual else None)
    shard_weights = per_head and dim == 1
    places = [Shard(dim)] + [Shard(0) if shard_weights else Replicate()] * 2 + [Shard(dim)]
    pieces = [
        None if t is None else distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in zip(whole, places, strict=True)
    ]
    results = [norm(*tensors, prenorm=residual) for tensors in (whole, pieces)]
    y, sharded = (result[0] + result[1] if residual else result for result in results)
    assert sharded.placements == (Shard(dim),)
    torch.testing.assert_close(sharded.full_tensor(), y)
    y.pow(3).sum().backward()
    sharded.pow(3).sum().backward()
    for i, (a, b) in enumerate(zip(whole, pieces, strict=True)):
        if a is not None:
            torch.testing.assert_close(b.grad.full_tensor(), a.grad)
            if i in (1, 2):
                assert b.grad.placements == ((Shard(0) if shard_weights else Partial()),)


def check_refused(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    from stepgraph.kernels import rms_norm
    from tests.kernels.norm.cases import rows

    x = distribute_tensor(rows(4, 16), mesh, [Shard(1)])
    for call in (lambda: rms_norm(x), lambda: rms_norm(x.detach().requires_grad_())):
        with pytest.raises(ValueError, match=r"its normalized dimension 1 sharded; allowed is Replicate"):
            call()


def check_all():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    for dim in (0, 1):
        for norm in ("rms", "layer"):
            for residual in (False, True):
                check_rows(mesh, dim, norm, residual)
    check_rows(mesh, 0, "layer", True, per_head=True)
    check_rows(mesh, 1, "layer", True, per_head=True)
    check_refused(mesh)


def test_two_ranks():
    on_ranks(RANKS, check_all)
