"""Layouts derived from splits over axes of the mesh."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stepgraph import compat
from stepgraph.capture import trace_step
from stepgraph.parallel import Mesh, MeshSpec, layouts, next_token_loss
from stepgraph.parallel.layout import Layout, fsdp_dim
from tests.distributed.ranks import TINY, in_fake_world, make_mesh, on_ranks, own_batch, parallel_model, whole_model


@pytest.fixture
def mesh():
    compat.init_fake_world(7, 8)
    yield Mesh(MeshSpec.parse("hsdp=2x2,tp=2"), "cpu")
    dist.destroy_process_group()


def layout(mesh, shape, *splits):
    return Layout(torch.Size(shape), mesh, splits, torch.bfloat16, torch.float32)


def test_splits_follow_each_other(mesh):
    both = layout(mesh, (12, 6), ("tp", 0), ("dp_shard", 0))
    assert both.local_shape == (3, 6) and both.region == ((9, 12), (0, 6)) and both.rows == 6 and not both.padded
    assert mesh.names == ("tp", "dp_shard", "dp_replicate")
    assert both.at_rest() == (Shard(0), Shard(0), Replicate())
    assert both.unreduced() == (Shard(0), Shard(0), Partial("avg"))
    assert both.store(torch.zeros(3, 6)).shape == (12, 6)


def test_the_last_shard_is_padded(mesh):
    padded = layout(mesh, (5, 6), ("tp", 1), ("dp_shard", 0))
    assert padded.local_shape == (3, 3) and padded.region == ((3, 5), (3, 6)) and padded.rows == 5 and padded.padded
    stored = padded.store(torch.arange(9.0).view(3, 3))
    assert stored.shape == (6, 6) and padded.without_padding(stored).shape == (5, 6)
    assert torch.equal(padded.own(stored.to_local()), torch.arange(6.0).view(2, 3))
    assert padded.at_rest() == (Shard(1), Shard(0), Replicate())


def test_what_no_axis_splits(mesh):
    scalar = layout(mesh, ())
    assert scalar.local_shape == () and scalar.region == () and not scalar.sharded and not scalar.padded
    assert scalar.at_rest() == (Replicate(),) * 3
    assert scalar.unreduced() == (Partial("sum"), Partial("avg"), Partial("avg"))
    norm = layout(mesh, (6,), ("dp_shard", 0))
    assert norm.unreduced() == (Partial("sum"), Shard(0), Partial("avg"))


def test_a_mesh_is_its_axes_in_order():
    spec = MeshSpec(dp_replicate=2, dp_shard=3, tp=4)
    assert list(spec.sizes.items()) == [("pp", 1), ("dp_replicate", 2), ("dp_shard", 3), ("tp", 4)]
    assert (spec.size, spec.dp) == (24, 6) and str(spec) == "hsdp=2x3,tp=4"
    assert dataclasses.replace(spec, tp=1) == MeshSpec.parse("hsdp=2x3")
    with pytest.raises(ValueError, match=r"^dp_shard=3 does not divide rows=8; try dp_shard=2 or dp_shard=4$"):
        spec.check_divides({"rows": 8}, "dp_shard")


@given(first=st.integers(1, 4096), second=st.integers(1, 4096), ranks=st.integers(1, 8192))
def test_fsdp_splits_the_dimension_that_spares_padding(first, second, ranks):
    """Weights of fewer experts than ranks would otherwise take as much on each rank as one expert has."""
    padded = [-(-size // ranks) * ranks / size for size in (first, second)]
    chosen = fsdp_dim((first, second, 7), ranks)
    assert padded[chosen] <= max(1.125, min(padded))
    assert chosen == 0 or padded[0] > 1.125
    assert fsdp_dim((first,), ranks) == 0


#: A head whose 3 rows are more padding than weight over 4 ranks: its columns are split.
FEW_ROWS = dataclasses.replace(TINY, vocab_size=3)


def _columns_are_gathered():
    mesh = make_mesh("fsdp=4")
    model, whole = parallel_model(mesh, FEW_ROWS), whole_model(FEW_ROWS)
    layout = layouts(model)["head.weight"]
    assert layout.shard_dim == 1
    weight = model.head.weight
    assert torch.equal(weight, whole.head.weight)
    grads = [torch.randn(weight.shape, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    weight.backward(grads[dist.get_rank()])
    grad = model.head._parameters["weight"].grad
    assert grad.placements == layout.at_rest()
    torch.testing.assert_close(grad.full_tensor(), torch.stack(grads).mean(0))


def test_columns_are_gathered_and_their_gradients_reduced():
    on_ranks(4, _columns_are_gathered)


def _count(world, counts):
    mesh = make_mesh(f"fsdp={world}")
    model = parallel_model(mesh, FEW_ROWS)
    assert layouts(model)["head.weight"].shard_dim == 1
    loss_fn, batch = next_token_loss(mesh), own_batch(mesh, 0)
    graph = trace_step(model, loss_fn, batch, torch.optim.AdamW(model.parameters())).step.graph
    (counts / str(world)).write_text(str(len(graph.nodes)))


def test_a_graph_does_not_grow_with_the_ranks(tmp_path):
    for world in (512, 1024):  # both beyond every dimension: the same are padded
        in_fake_world(0, world, _count, world, tmp_path)
    assert (tmp_path / "512").read_text() == (tmp_path / "1024").read_text()


def _state_dicts(folder):
    mesh, config = make_mesh("fsdp=2,tp=2"), dataclasses.replace(TINY, vocab_size=130, dim=44, n_heads=2, n_kv_heads=2)
    model, whole = parallel_model(mesh, config), whole_model(config)
    live = dict(model.named_parameters())
    padded = [name for name, layout in layouts(model).items() if layout.padded]
    assert padded
    state = model.state_dict()
    for name, right in whole.state_dict().items():
        assert state[name].shape == right.shape
        assert torch.equal(state[name].full_tensor() if isinstance(state[name], DTensor) else state[name], right), name
    assert all(model.state_dict(keep_vars=True)[name] is p for name, p in live.items())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert all(torch.equal(full[name], right) for name, right in whole.state_dict().items())
    # Back as it was given, replicated, and by way of a checkpoint of torch's.
    dcp.save({"model": state}, checkpoint_id=folder)
    read = {"model": parallel_model(mesh, config).state_dict()}
    for tensor in read["model"].values():
        tensor.zero_()
    dcp.load(read, checkpoint_id=folder)
    replicated = {
        n: v.redistribute(placements=[Replicate()] * 2) if isinstance(v, DTensor) else v for n, v in state.items()
    }
    for one in (state, replicated, read["model"], model.state_dict(keep_vars=True)):
        for assign in (False, True):
            if assign and one is replicated:
                continue  # which is what it says: parameters are then what is given
            other = parallel_model(mesh, config)
            for p in other.parameters():
                p.data.to_local().fill_(7)
            other.load_state_dict(one, assign=assign)
            for name, p in other.named_parameters():
                layout = layouts(other)[name]
                assert torch.equal(p.to_local(), live[name].to_local()), name  # zeros beyond the end
                assert p.placements == layout.at_rest()
    with pytest.raises(RuntimeError, match="size mismatch"):
        wrong = dict(state)
        wrong[padded[0]] = torch.zeros(3, 3)
        other.load_state_dict(wrong)


def test_state_dicts_are_without_padding(tmp_path):
    on_ranks(4, _state_dicts, tmp_path)
