"""Experts' tokens that travel in fp8: the bits of casts after they arrive, on ranks, and what stays."""

import dataclasses

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.graph.collectives import stage_of
from stepgraph.graph.provenance import phase_of, role_of
from stepgraph.models import family_of
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.models.moe import MoE
from stepgraph.parallel import next_token_loss, parallelize
from stepgraph.passes import StepOptions, chosen
from tests.distributed.ranks import make_mesh, on_ranks
from tests.distributed.test_experts import VOCAB, adamw, assert_same_state, batch_of, own_batch
from tests.models.moe_models import DEEPSEEK, our_model
from tests.passes.moe.test_swiglu import report_of, with_swiglu

ours = torch.ops.stepgraph

CONFIG = dataclasses.replace(
    DEEPSEEK, n_layers=1, n_dense_layers=0, vocab_size=VOCAB, dim=32, moe=dataclasses.replace(DEEPSEEK.moe, ffn_dim=16)
)


def passes(travel, memory="none", recipe="rowwise"):
    """Experts in fp8, whatever it costs, without kernels that round otherwise from run to run of the pass."""
    options = StepOptions(inductor="off", memory=memory, fp8=recipe, fp8_experts=True, cuda_graph=False)
    found = [p for p in with_swiglu(chosen(options)) if travel or p.name != "exchange_fp8"]
    return [p.with_options(unprofitable=True) if p.name == "fp8_experts" else p for p in found]


#: What the default test runs.
FEW = ("expert_swiglu", "unread_rows", "fp8_experts", "exchange_fp8")


class Small(nn.Module):
    """A layer of experts and no more, for a short trace."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, CONFIG.dim), nn.Linear(CONFIG.dim, VOCAB, bias=False)
        self.moe = MoE(CONFIG.dim, dataclasses.replace(CONFIG.moe, n_shared=0))
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens):
        return self.head(self.moe(self.embed(tokens)))


def check_ranks(chunks, memory, few=False):
    """Losses, parameters and buffers of two steps are those of casts after the exchange, bit for bit."""
    mesh, runs = make_mesh("fsdp=2,ep=2"), []
    for exchange, travel in (("collectives", False), ("collectives", True), ("symmetric", True)):
        applied = [p for p in passes(travel, memory) if not few or p.name in FEW]
        model = Small() if few else our_model(CONFIG)
        options = {"expert_exchange": exchange, "expert_chunks": chunks, "param_dtype": torch.bfloat16}
        parallelize(model, mesh, None if few else family_of(CONFIG).tp_plan(CONFIG), **options)
        step = stepgraph.capture(model, next_token_loss(mesh), own_batch(mesh, 0), adamw(model), passes=applied)
        runs.append(([step(own_batch(mesh, i)) for i in range(2)], model, step))
    (losses, model, before), *others = runs
    whole = {("dispatch", torch.bfloat16): 2 * chunks, ("combine", torch.bfloat16): 2 * chunks}
    assert what_travels(before) == whole, what_travels(before)
    for found, other, step in others:
        assert all(map(torch.equal, losses, found))
        assert_same_state(model, other)
        halves = {(kind, torch.uint8): chunks for kind in ("dispatch", "combine")}
        assert what_travels(step) == halves | dict.fromkeys(whole, chunks), what_travels(step)
        summary = report_of(step, "exchange_fp8").summary
        assert summary.endswith(f"exchanges in fp8: {chunks} of kind combine, {chunks} of kind dispatch"), summary
        assert f"; {2 * chunks} of {4 * chunks} casts fused into the SwiGLU" in report_of(step, "fp8_experts").summary


def what_travels(step):
    """How many exchanges of rows bring tokens to experts or back, by kind and dtype."""
    found = {}
    for node in step.graph.graph.nodes:
        role = role_of(node)
        if role and role.kind in ("dispatch", "combine") and stage_of(node) in ("wait", "end"):
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype not in (torch.int32, torch.int64):
                found[role.kind, value.dtype] = found.get((role.kind, value.dtype), 0) + 1
    return found


def _check_ranks():
    check_ranks(1, "none", few=True)


def test_experts_on_two_ranks():
    on_ranks(2, _check_ranks)


def _check_more():
    check_ranks(2, "full")


@pytest.mark.long
def test_experts_on_two_ranks_otherwise():
    on_ranks(2, _check_more)


def one_rank(travel, recipe="rowwise"):
    model = our_model(CONFIG).bfloat16()
    step = stepgraph.capture(model, one_rank_loss, batch_of(0, 1), adamw(model), passes=passes(travel, recipe=recipe))
    return [step(batch_of(i, 1)) for i in range(2)], model, step


def test_rows_of_one_rank_are_copied_in_fp8():
    (losses, model, _), (found, other, step) = map(one_rank, (False, True))
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert report_of(step, "exchange_fp8").summary == "2 of 2 casts of expert rows moved before the exchange"
    copied = [n for n in step.graph.graph.find_nodes(op="call_function", target=ours.gather_rows.default)]
    assert {phase_of(n) for n in copied if n.meta["val"].dtype == torch.uint8} == {"forward", "backward"}


def test_rows_that_gradients_of_weights_read_in_bf16_stay():
    *_, step = one_rank(True, "rowwise-bf16-weight-gradients")
    report = report_of(step, "exchange_fp8")
    assert report.changed == 0
    assert report.notes == ["2 stay after the exchange: stepgraph.grouped_mm_weight reads the rows too"]
