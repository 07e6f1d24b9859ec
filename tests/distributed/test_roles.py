"""What each collective is for, and that all ranks have the same graph."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import stepgraph
from stepgraph import compat
from stepgraph.capture import StepGraph, trace_step
from stepgraph.capture.fake import fake_mode
from stepgraph.capture.roles import record_roles
from stepgraph.graph import collectives
from stepgraph.graph.provenance import Provenance, Role, role_of, set_provenance, together
from stepgraph.graph.step_graph import InputSpec
from stepgraph.graph.values import BatchLeaf, Buffer, Loss, Parameter
from stepgraph.parallel import next_token_loss
from stepgraph.passes import configured, get, run_passes
from tests.distributed.ranks import TINY, in_fake_world, make_mesh, on_ranks, own_batch, parallel_model

LAYERS = 2
aten = torch.ops.aten


def traced(text, **options):
    """(mesh, step) of one training step."""
    mesh = make_mesh(text)
    model = parallel_model(mesh, dataclasses.replace(TINY, n_layers=LAYERS, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return mesh, trace_step(model, next_token_loss(mesh), own_batch(mesh, 0), optimizer, max_grad_norm=0.5).step


def _same_on_all_ranks(text, world):
    mesh, step = traced(text)
    texts = [step.text()]
    for axis in mesh.names:  # what nodes call a group is that group
        name = next(name for name, found in step.axes.items() if found == axis)
        assert compat.process_group(name) == mesh.axis(axis).get_group()
        assert compat.group_name(name) == mesh.axis(axis).get_group().group_name
    run_passes(step, configured("exact", cuda_graph=False))
    texts.append(step.text())
    found = [None] * world
    dist.all_gather_object(found, texts)
    for theirs in found:
        for mine, other in zip(texts, theirs, strict=True):
            for line, other_line in zip(mine.splitlines(), other.splitlines(), strict=True):
                assert line == other_line


@pytest.mark.slow
@pytest.mark.parametrize("text", [pytest.param("fsdp=2,tp=2", marks=pytest.mark.long), "hsdp=2x2"])
def test_all_ranks_have_the_same_graph(text):
    """Embedding, loss and the process groups' names included."""
    on_ranks(4, _same_on_all_ranks, text, 4)


def roles(step, kind):
    """Roles of the collectives, without their waits, of a kind, counted."""
    return Counter(role for node in step.graph.nodes if collectives.stage_of(node) == "begin"
                   if (role := role_of(node)) and role.kind == kind)  # fmt: skip


def _every_parameter(text, tied):
    mesh, step = traced(text, tie_embeddings=tied)
    names = [spec.what.name for spec in step.inputs if spec.what.kind == "parameter"]
    sharded, replicated = mesh.spec.dp_shard > 1, mesh.spec.dp_replicate > 1
    norms = [name for name in names if "norm" in name]
    over = [(names, "dp_shard")] * sharded + [(names, "dp_replicate")] * replicated
    over += [(norms, "tp")] * (mesh.spec.tp > 1)
    expected = Counter(Role("reduce", (name,), axis) for where, axis in over for name in where)
    gathers = Counter(Role("gather", (name,), "dp_shard") for name in names if sharded)
    for counted in (expected, gathers) if tied and sharded else ():
        for role in [role for role in counted if role.parameters == ("embed.weight",) and role.axis == "dp_shard"]:
            counted[role] += 1  # read by the embedding and by the head
    if not tied:
        assert roles(step, "reduce") == expected
    assert roles(step, "gather") == gathers
    axes = {role.axis for role in roles(step, "activation")}
    assert axes <= {"tp", "world", *(mesh.names if len(mesh.names) == 1 else [])}
    communicating = [n for n in step.nodes("forward", "loss", "backward") if collectives.operator_of(n)]
    assert all(role_of(node) for node in communicating)
    assert not any(role_of(node) for node in step.nodes("optimizer"))
    finished = {n for n in step.nodes("backward") if any(u.op == "output" or u in optimizer(step) for u in n.users)}
    assert finished & collectives.tail(step) or not expected
    for node in collectives.tail(step):  # nothing else reads it
        assert all(user in collectives.tail(step) or user in optimizer(step) for user in node.users), node


def optimizer(step):
    return set(step.nodes("optimizer"))


def _every_mesh():
    for text, tied in (("fsdp=4", True), ("ddp=4", False), ("hsdp=2x2", False), ("fsdp=2,tp=2", False)):
        _every_parameter(text, tied)


def test_every_parameter_is_gathered_and_its_gradient_reduced():
    in_fake_world(0, 4, _every_mesh)


def _buckets():
    _, step = traced("fsdp=4")
    run_passes(step, ["dead_code", "bucket_collectives", "overlap"])
    blocks = [
        {what.path for _, what in step.bound() if isinstance(what, Parameter) and what.path.startswith(f"layers.{i}.")}
        for i in (0, 1)
    ]
    for kind in ("gather", "reduce"):
        found = [set(role.parameters) for role in roles(step, kind)]
        assert all(block in found for block in blocks), kind
    bucket = next(
        n for n in step.graph.nodes if n.target is collectives.REDUCE_SCATTER and len(role_of(n).parameters) > 2
    )
    assert role_of(bucket.args[0]) is None  # before the first reduction: backward's own
    line = next(line for line in step.text().splitlines() if line.startswith(f"{bucket.name}: "))
    assert line.endswith("(reduce 9 parameters over dp_shard)")
    run_passes(step, [get("copy_engines", ranks_per_machine=4)])
    assert not collectives.gathers(step) and not collectives.reductions(step)
    found = [set(role.parameters) for role in roles(step, "reduce")]
    assert all(block in found for block in blocks)


def test_buckets_are_for_all_their_parameters():
    in_fake_world(0, 4, _buckets)


class Odd(nn.Module):
    """A user's own sharded model: a parameter that is scaled and gathered, and activations gathered over the mesh."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        full = torch.randn(4, 4)
        self.weight = nn.Parameter(DTensor.from_local(full[:2].clone(), mesh, [Shard(0)], run_check=False))
        self.whole = nn.Parameter(DTensor.from_local(full.clone(), mesh, [Replicate()], run_check=False))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        weight = (self.weight * 2).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        x = x @ weight * self.scale  # the only use of scale: its gradient is no reduction's owner
        part = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        x = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return x @ self.whole.to_local(grad_placements=[Partial("avg")])


def _own_model():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    step = trace_step(Odd(mesh), lambda model, x: model(x).sum(), torch.randn(3, 4)).step
    assert roles(step, "gather") == {Role("gather", ("weight",), "data"): 1}
    # That of `whole` is reduced at the end of backward, where gradients get the layout of their parameters.
    assert roles(step, "reduce") == {Role("reduce", (name,), "data"): 1 for name in ("weight", "whole")}
    assert roles(step, "activation") == {Role("activation", (), "data"): 2}  # forward and backward


def test_a_users_own_sharded_model():
    in_fake_world(0, 2, _own_model)


def _names():
    def named(shape, axes):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        return mesh, [compat.name_group(mesh[axis].get_group(), axis) for axis in axes]

    first, names = named((2, 2), ("dp_shard", "tp"))
    assert names == ["dp_shard", "tp"]
    assert compat.name_group(first["tp"].get_group(), "tp") == "tp"
    second, names = named((2, 2), ("dp_shard", "tp"))  # both are open
    assert names == ["dp_shard.1", "tp.1"]
    dist.destroy_process_group(first["tp"].get_group())
    assert compat.name_group(second["dp_shard"].get_group(), "tp") == "tp"
    dist.destroy_process_group()
    compat.init_fake_world(1, 4)
    mesh, names = named((4, 1), ("dp_shard", "tp"))
    assert names == ["dp_shard", "tp"]
    assert compat.process_group("tp") == mesh["tp"].get_group() and compat.process_group("tp").size() == 1
    with pytest.raises(RuntimeError):
        compat.process_group("tp.1")


def test_names_of_process_groups():
    in_fake_world(0, 4, _names)


def accumulating():
    """Two layers' gradients, each reduced and added in place to what microbatches before have left."""
    graph, inputs, reducing = fx.Graph(), [], {}

    def placed(kind, name, rows):
        node = graph.placeholder(f"{kind.kind}_{name.replace('.', '_')}")
        node.meta["val"] = torch.empty(rows, 4)
        set_provenance(node, Provenance(name, "input", ""))
        inputs.append(InputSpec(kind(f"{name}.weight")))
        return node

    def call(path, target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        set_provenance(node, Provenance(path, "backward", "file.py:1"))
        return node

    with fake_mode():
        weights = {name: placed(Parameter, name, 2) for name in ("a.0", "a.1")}
        sums = {name: placed(Buffer, name, 2) for name in weights}
        x = placed(BatchLeaf, "batch", 4)
        added, order = [], {}
        for name in reversed(weights):
            grad = x = call(name, aten.mul.Tensor, x, 2.0)
            scattered = call(name, collectives.REDUCE_SCATTER, grad, "avg", 2, "0")
            reducing[scattered] = weights[name]
            waited = call(name, collectives.WAIT, scattered)
            half = call(name, aten.mul.Tensor, waited, 0.5)
            added.append(call(name, aten.add_.Tensor, sums[name], half))
            order[name] = [grad, scattered, waited, half, added[-1]]
        graph.output((call("", aten.sum.default, x),))
    step = StepGraph(fx.GraphModule(nn.Module(), graph), inputs, [Loss()], ["a.0", "a.1"])
    record_roles(step, reducing, [])
    return step, order


def _accumulators():
    step, order = accumulating()
    assert collectives.tail(step) == {node for grad, *nodes in order.values() for node in nodes}
    assert role_of(order["a.1"][-1]) == Role("reduce", ("a.1.weight",), "world")
    (report,) = run_passes(step, ["overlap"])
    assert report.matched == 2
    position = {node: i for i, node in enumerate(step.graph.nodes)}
    _, first, *finishing = order["a.1"]
    # One region later: when the next one's reduction is under way.
    assert position[first] < position[order["a.0"][1]] < min(position[node] for node in finishing)
    assert [position[n] for n in finishing] == sorted(position[n] for n in finishing)


def test_what_adds_to_accumulators_finishes_gradients():
    in_fake_world(0, 2, _accumulators)


def test_one_role_for_several_nodes():
    a, b, c = (
        Provenance(path, "backward", "f:1", None, Role("reduce", (path,), "dp")) for path in ("x.a", "x.b", "x.c")
    )
    assert together([a, b, a]) == Provenance("x", "backward", "f:1", None, Role("reduce", ("x.a", "x.b"), "dp"))
    assert str(together([a, b]).role) == "reduce x.a, x.b over dp"
    assert together([a, b._replace(role=None)]).role is None
    other = c._replace(role=c.role._replace(axis="tp"))
    assert together([a, other]).role is None


def test_a_step_of_one_rank_has_no_roles():
    step = stepgraph.capture(nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.ones(2, 4), passes=[]).graph
    assert step.axes == {} and not any(role_of(node) for node in step.nodes())


def _table():
    """Each operator's group, ranks and bytes; a collective over one of two axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    group = compat.name_group(mesh["b"].get_group(), "b")
    graph = fx.Graph()
    x, counts, to, came = map(graph.placeholder, ("x", "counts", "to", "came"))
    c10d, ours = torch.ops._c10d_functional, torch.ops.stepgraph
    with fake_mode():
        x.meta["val"] = torch.empty(8, 4)  # 128 bytes
        for node, n in ((counts, 4), (to, 16), (came, 12)):
            node.meta["val"] = torch.empty(n, dtype=torch.int32)

        def call(target, *args):
            node = graph.call_function(target.default, args)
            node.meta["val"] = target.default(*fx.map_arg(args, lambda n: n.meta["val"]))
            return node

        for target, args, sent in (
            (c10d.all_gather_into_tensor, (x, 2, group), 128),
            (c10d.all_gather_into_tensor_coalesced, ([x, x], 2, group), 256),
            (c10d.reduce_scatter_tensor, (x, "sum", 2, group), 64),
            (c10d.all_reduce, (x, "sum", group), 128),
            (c10d.all_to_all_single, (x, [4, 4], [4, 4], group), 64),
            (c10d.broadcast, (x, 0, group), 128),
            (ours.gather_begin, ([x], [32], torch.bfloat16, 2, group), 64),
            (ours.reduce_begin, ([x, x], 2, group), 128),
            (ours.counts_begin, (counts, 2, group), 16),
            (ours.rows_begin, (x, to, 2, to, came, 2, group), 96),  # of 16 rows of 16 bytes 12 have room
            (ours.rows_begin, (x, None, 1, came, to, 2, group), 96),
            (ours.all_gather_matmul, (call(aten.unsqueeze, x, 0), [], True, 2, group), 128),
        ):
            node = call(target, *args)
            assert collectives.group_of(node) == group and collectives.group_size(node) == 2, target
            assert collectives.bytes_sent(node) == sent, target
            assert collectives.stage_of(node) in ("begin", "joined")
    assert collectives.stage_of(x) is None
    assert collectives.exchanging(graph) == {mesh["b"].get_group().group_name}


def test_the_table_of_operators():
    in_fake_world(0, 4, _table)
