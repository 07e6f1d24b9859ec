"""What full Inductor generates issues and waits for communication in the order that the passes made."""

import contextlib
import re
from unittest import mock

import pytest
import torch

import stepgraph
from stepgraph.capture import phase_of
from stepgraph.inductor.packed import pack, unpack
from stepgraph.parallel import mean_over_mesh
from stepgraph.passes import configured
from stepgraph.passes.compile.helpers import Helpers
from stepgraph.passes.runner import run_passes
from tests.distributed.ranks import in_fake_world, make_mesh, own_batch, parallel_model


class Generated(BaseException):
    """Ends a compilation once its code is there."""


def generated(step, inductor):
    """The wrapper code of the step's first compiled piece, all blocks in it, and the buffers whose memory is not used
    again; nothing is compiled to machine code. Every piece is also packed, as it is for helper processes on a GPU."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    code = []

    def stop(lowering):
        code.append((lowering.codegen()[0].value, set(lowering.never_reuse_buffers)))
        raise Generated

    def share(helpers, work):
        for piece, options in work.values():
            unpack(pack(piece, options))
        return iter(work)

    patches = (
        *(mock.patch.object(GraphLowering, "compile_to_module", stop), config.patch(fx_graph_cache=False)),
        mock.patch.object(Helpers, "share", share),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(contextlib.suppress(Generated))
        run_passes(step, [inductor.with_options(cut_blocks=False)])
    return code[0]


def issued(step):
    """Names of collectives, waits and pipelined products of forward, loss and backward, in the graph's order, up to the
    embedding's gradient: that stays with eager, and ends the piece."""
    nodes = [n for n in step.graph.nodes if phase_of(n) != "optimizer"]
    names = [str(n.target).split(".") for n in nodes if n.op == "call_function"]
    names = names[: names.index(["aten", "embedding_dense_backward", "default"])]
    return [name[1] for name in names if name[0] in ("_c10d_functional", "stepgraph")]


def _check(ours):
    """``ours``: communication by operators of ours, in pipelines and by copy engines."""
    mesh = make_mesh("fsdp=2,tp=2")
    model = parallel_model(mesh, param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    chosen = {p.name: p for p in configured(async_tp=ours, copy_engines=ours, reshard="always")}
    inductor = chosen.pop("inductor")
    for name in ("cuda_graph", "expand_optimizer"):
        del chosen[name]
    if ours:
        chosen["async_tensor_parallel"] = chosen["async_tensor_parallel"].with_options(unprofitable=True)
    passes = list(chosen.values())

    def loss_fn(model, batch):  # no operator of ours that writes, which would end the piece before backward
        return mean_over_mesh(model(batch["tokens"]).float().square().mean(), mesh)

    step = stepgraph.capture(model, loss_fn, own_batch(mesh, 0), optimizer, passes=passes).graph
    code, kept = generated(step, inductor)
    calls = re.findall(r"(?m)^ +(?:\w+ = )?torch\.ops\.(?:_c10d_functional|stepgraph)\.(\w+)\.default\(", code)
    made_in_place = [call.removesuffix("_") for call in calls]
    expected = issued(step)
    assert made_in_place == expected and len(expected) > 20
    # What copy engines read after the call is not written again, whoever else has read it last.
    sent = re.findall(r"reduce_begin\.default\(\[(.*?)\]", code)
    assert len(sent) == expected.count("reduce_begin")
    assert {buffer for arguments in sent for buffer in arguments.split(", ")} <= kept
    assert ours == ({"all_gather_matmul", "gather_begin", "reduce_end"} < set(expected))


@pytest.mark.slow
@pytest.mark.parametrize("ours", [pytest.param(False, marks=pytest.mark.long), True])
def test_order(ours):
    in_fake_world(3, 4, _check, ours)
