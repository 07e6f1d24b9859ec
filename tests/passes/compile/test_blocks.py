"""Pieces for compiling by block: equal blocks have equal pieces, however many there are, and on ranks as well."""

import dataclasses
from collections import Counter

import pytest
import torch

from stepgraph.capture import phase_of, trace_step
from stepgraph.graph.marks import COMPILE
from stepgraph.inductor.regional import structure
from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, next_token_loss
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import Mesh, MeshSpec, parallelize
from stepgraph.parallel import next_token_loss as parallel_loss
from stepgraph.passes import configured, get, run_passes
from stepgraph.passes.compile.blocks import consecutive
from tests.distributed.ranks import in_fake_world

EXPAND = dataclasses.replace(get("expand_optimizer", small=0), needs_cuda=False)


def kind(node):
    return "step" if phase_of(node) != "optimizer" or node.meta.get(COMPILE) else None


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, 320, (2, 32), generator=generator) for key in ("tokens", "targets")}


def llama(layers, device=None):
    with torch.device(device or "cpu"):
        model = Llama3(Llama3Config(64, layers, 4, 2, 128, 320, 64))
    return model


def captured(model, loss_fn):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = trace_step(model, loss_fn, batch(), optimizer, max_grad_norm=1.0).step
    run_passes(step, configured("exact", cuda_graph=False))
    run_passes(step, [EXPAND])
    return step


def pieces_by_structure(step):
    pieces = consecutive(step, kind, cut=True)
    assert [n for piece in pieces for n in piece.nodes] == [n for n in step.nodes() if kind(n)]
    inside = {node: piece for piece in pieces for node in piece.nodes}
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    for node in inside:
        assert all(order[i] < order[node] for i in node.all_input_nodes)
    return Counter(structure(piece) for piece in pieces)


def check_repeats(build, loss_fn):
    few, many = (pieces_by_structure(captured(build(layers), loss_fn)) for layers in (4, 6))
    assert few.keys() == many.keys(), "another number of blocks, other pieces"
    # Forward, backward and update of a block in the middle come once more with every block.
    grown = [many[key] - few[key] for key in few if many[key] > few[key]]
    assert grown == [2, 2, 2]


def test_blocks_repeat_on_one_rank():
    def build(layers):
        model = llama(layers)
        model.init_weights(0)
        return model

    check_repeats(build, next_token_loss)


def check_ranks(spec):
    mesh = Mesh(MeshSpec.parse(spec), "cpu")

    def build(layers):
        model = llama(layers, "meta")
        parallelize(model, mesh, TP_PLAN, device="cpu", param_dtype=torch.bfloat16)
        return model

    check_repeats(build, parallel_loss(mesh))


@pytest.mark.parametrize(
    "spec", ["fsdp=2,tp=2", *(pytest.param(spec, marks=pytest.mark.long) for spec in ("fsdp=2", "hsdp=2x2"))]
)
def test_blocks_repeat_on_ranks(spec):
    """With gathers ahead and reductions behind, which run next to another block."""
    in_fake_world(0, MeshSpec.parse(spec).size, check_ranks, spec)


def test_uncut_pieces_are_the_longest_runs():
    model = Golf(GolfConfig(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=320))
    model.init_weights(0)
    step = captured(model, next_token_loss)
    whole, updates = consecutive(step, kind, cut=False)
    assert {phase_of(n) for n in updates.nodes} == {"optimizer"}
    assert whole.nodes == [n for n in step.nodes() if phase_of(n) != "optimizer"]
    assert len(consecutive(step, kind, cut=True)) > 6
