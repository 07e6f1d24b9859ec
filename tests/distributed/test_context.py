"""Context parallelism: ranks that share sequences train as one rank does, in one graph, packed documents included."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.cli import parse_train
from stepgraph.graph.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, stage_of
from stepgraph.graph.provenance import role_of
from stepgraph.models import DeepSeekV3, Golf, GolfConfig
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.models.deepseek_v3 import deepseek_v3_debug
from stepgraph.parallel import MeshSpec, mean_over_mesh, next_token_loss, parallelize
from tests.distributed.hf_ranks import VOCAB, build
from tests.distributed.ranks import (
    SEQ,
    TINY,
    full,
    global_batch,
    make_mesh,
    on_ranks,
    own_batch,
    parallel_model,
    whole_model,
)
from tests.distributed.test_exact import check_gradients, check_one_rank, check_training
from tests.distributed.test_train import TINY_RUN, records, train_on

DEEPSEEK = deepseek_v3_debug()
DEEPSEEK = dataclasses.replace(
    DEEPSEEK, dim=32, n_layers=2, ffn_dim=48, max_seq_len=64, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=12, moe=dataclasses.replace(DEEPSEEK.moe, ffn_dim=16, balance_loss=0.1),
)  # fmt: skip


FORMS = ("ulysses", "gather")
ULYSSES = ("--context", "ulysses")


def _same_as_one(model, mesh, batch, build):
    """Loss and gradients of ``model``, parallel, are those of a whole one on the same batch."""
    alone, loss_fn = build(), next_token_loss(mesh)
    expected, loss = one_rank_loss(alone, batch), loss_fn(model, batch)
    for value in (expected, loss):
        value.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        scale = a.grad.abs().max().item()
        torch.testing.assert_close(full(model, name, b.grad), a.grad, rtol=0, atol=5e-6 * scale, msg=name)


def _packed(mesh, rows=2):
    batch = global_batch(0, mesh.spec.dp, rows)
    ends = torch.tensor([5, 11])[:rows]  # within parts of ranks, and across
    place = torch.arange(SEQ).expand(rows, -1)
    return batch | {"positions": torch.where(place < ends[:, None], place, place - ends[:, None])}


def _built(kind, config):
    torch.manual_seed(0)
    return kind(config)


def _check(text, context):
    mesh = make_mesh(text)
    check_one_rank(mesh, context=context)
    if text == "cp=2":
        return check_gradients(mesh, context=context)
    check_training(mesh, param_dtype=torch.bfloat16, context=context)


def _check_transformers(captures_all):
    """A model of transformers with labels, alone and parallel: rows that fill a part of their length, and documents."""
    mesh, generator = make_mesh("cp=2"), torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCAB, (2, 12), generator=generator)
    labels = tokens.masked_fill(torch.arange(12) < 4, -100)
    batch, place = {"input_ids": tokens, "labels": labels}, torch.arange(12).expand(2, -1)
    masked = batch | {"attention_mask": (place < 10).long(), "labels": labels.masked_fill(place >= 10, -100)}
    packed = batch | {"position_ids": torch.where(place < 7, place, place - 7)}
    alone = build("qwen3")
    ulysses, gather = (parallelize(build("qwen3"), mesh, context=context) for context in FORMS)

    def loss_fn(model, batch):
        return mean_over_mesh(model(**batch).loss, mesh)

    cases = [(ulysses, batch), (ulysses, masked), (ulysses, packed), (gather, batch), (gather, masked)]
    for model, one in cases:
        expected, loss = alone(**one, use_cache=False).loss, loss_fn(model, one)
        for m, value in ((alone, expected), (model, loss)):
            m.zero_grad()
            value.backward()
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
        for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                full(model, name, b.grad), a.grad, rtol=0, atol=5e-6 * a.grad.abs().max(), msg=name
            )
        if captures_all or one is packed:
            step = stepgraph.capture(model, loss_fn, one, passes="exact")
            assert torch.equal(step(one), loss)
    with pytest.raises(ValueError, match=r"^with cp, Qwen3ForCausalLM takes input_ids and, by name, .* inputs_embeds:"):
        ulysses(inputs_embeds=torch.zeros(2, 12, 32))
    with pytest.raises(
        ValueError, match=r"^cp splits sequences, and Gemma3ForCausalLM has layers of sliding_attention"
    ):
        parallelize(build("gemma3"), mesh)
    with pytest.raises(ValueError, match=r"^mesh fsdp=1,cp=2 splits sequences and Linear has no attention that takes"):
        parallelize(torch.nn.Linear(2, 2), mesh)


def _check_models(text, context):
    mesh = make_mesh(text)
    _same_as_one(parallel_model(mesh, context=context), mesh, _packed(mesh), whole_model)
    for kind, config in ((Golf, GolfConfig(48, 1, 4, 2, 80, 130)), (DeepSeekV3, DEEPSEEK)):
        model = parallelize(_built(kind, config), mesh, context=context)
        for batch in (_packed(mesh), global_batch(0, mesh.spec.dp)):
            _same_as_one(model, mesh, batch, lambda kind=kind, config=config: _built(kind, config))
            model.zero_grad()
    model, batch = parallel_model(mesh, context=context), own_batch(mesh, 0)
    step = stepgraph.capture(model, next_token_loss(mesh), batch, passes="exact")
    exchanges = [n for n in step.graph.nodes() if (role := role_of(n)) and role.axis == "cp" and stage_of(n) == "begin"]
    assert {role_of(n).kind for n in exchanges} == {"activation"}
    if context == "ulysses":  # to heads and back, forward and backward
        assert [n.target for n in exchanges] == [ALL_TO_ALL] * 4 * TINY.n_layers
        refused = r"^cp=2 does not divide the sequence length 15; try 14$"
    else:
        assert [n.target for n in exchanges] == [ALL_GATHER, REDUCE_SCATTER] * TINY.n_layers
        attends = [n for n in step.graph.nodes() if n.target is torch.ops.stepgraph.document_attention.default]
        assert len(attends) == 2 * TINY.n_layers  # an early chunk and a late one
        refused = r"^cp=2 of context=gather, which cuts sequences into 4 parts, does not divide .* length 15; try 12$"
    texts = [None] * mesh.spec.size
    dist.all_gather_object(texts, str(step.graph.graph))
    assert len(set(texts)) == 1  # one graph on all ranks
    with pytest.raises(ValueError, match=refused):
        next_token_loss(mesh)(model, {k: v[:, :15] for k, v in batch.items()})


@pytest.mark.parametrize(
    "text",
    ["cp=2", "fsdp=2,cp=2", "tp=2,cp=2", *(pytest.param(m, marks=pytest.mark.long) for m in ("ddp=2,cp=2", "cp=4"))],
)
@pytest.mark.parametrize("context", FORMS)
def test_training_is_that_of_one_rank(text, context):
    on_ranks(MeshSpec.parse(text).size, _check, text, context)


@pytest.mark.parametrize("context", FORMS)
def test_packed_documents_and_other_models(context):
    on_ranks(2, _check_models, "cp=2", context)


@pytest.mark.parametrize("captures_all", [False, pytest.param(True, marks=pytest.mark.long)])
def test_models_of_transformers(captures_all):
    on_ranks(2, _check_transformers, captures_all)


@pytest.mark.long
def test_stepgraph_train_and_its_checkpoint_on_another_mesh(tmp_path):
    run, base = tmp_path / "run", [*TINY_RUN, "--data", "stdlib", "--document-mask", "on", "--accumulate", "2"]
    train_on(2, *base, "--batch-size", "2", "--mesh", "cp=2", "--out", run)
    train_on(1, *base, "--batch-size", "2", "--mesh", "fsdp=1", "--out", tmp_path / "one")
    found, expected = (records(folder, "loss", "grad_norm") for folder in (run, tmp_path / "one"))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=0)
    assert json.loads((run / "summary.json").read_text())["tokens"] == 6 * 2 * 2 * 32
    train_on(2, "--resume", run, "--mesh", "fsdp=2", "--batch-size", "1", "--steps", "7")
    assert [step for step, _ in records(run, "loss")] == list(range(1, 8))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "cp=3"], "context=gather over fsdp=1,cp=3 cuts sequences into 6 parts, .* try seq_len=252$"),
        (["--mesh", "cp=3", *ULYSSES], "cp=3 does not divide seq_len=256; try cp=2$"),
        (["--mesh", "cp=4", "--model.n-heads", "6", *ULYSSES], "cp=4 does not divide n_heads=6; try cp=2$"),
        (["--mesh", "cp=2", "--model.n-heads", "6", "--model.n-kv-heads", "3", *ULYSSES], "divide n_kv_heads=3"),
        (["--mesh", "fsdp=2", "--context", "gather"], "context=gather needs context parallelism.* add cp=2"),
        (["--mesh", "pp=2,cp=2", "--accumulate", "2"], "mesh fsdp=1,cp=2,pp=2 combines pp and cp"),
    ],
)
def test_what_is_refused(words, message):
    sizes = ["--model.n-heads", "4", "--model.n-kv-heads", "2"]
    with pytest.raises(ValueError, match=message):
        parse_train(["llama3-debug", *sizes, *words]).validate()
