"""Packed rows: what is in them, and that a model computes of each document what it computes of it alone."""

import pytest
import torch

import stepgraph
from stepgraph.integrations import GraphTrainer, PackToBudget, attend_within_documents

transformers = pytest.importorskip("transformers")

VOCAB = 61
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MODELS = {
    "LlamaConfig": SHAPE,
    "Qwen3Config": SHAPE | {"head_dim": 8},
    "Qwen2Config": SHAPE,
    "MistralConfig": SHAPE | {"sliding_window": 3},
    "Gemma3TextConfig": SHAPE | {"head_dim": 8, "sliding_window": 4},
    "GPT2Config": GPT2,
    "GPTNeoXConfig": {k: v for k, v in SHAPE.items() if "key_value" not in k} | {"max_position_embeddings": 64},
    "Qwen3MoeConfig": SHAPE | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "OlmoConfig": SHAPE,
}
LENGTHS = (7, 3, 12, 1, 9)


def model_of(name, options):
    torch.manual_seed(0)
    config = getattr(transformers, name)(vocab_size=VOCAB, pad_token_id=0, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def examples(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, VOCAB, (n,), generator=generator).tolist()} for n in lengths]


def test_a_row_holds_whole_documents():
    pack = PackToBudget(16, max_documents=4, max_length=12, pad_token_id=60)
    data = examples()
    rows = list(pack.rows(data))
    found = []
    for row in rows:
        assert all(len(value) == 16 for value in row.values())
        starts = [i for i, p in enumerate(row["position_ids"].tolist()) if p == 0]
        for a, b in zip(starts, [*starts[1:], 16], strict=True):
            tokens = row["input_ids"][a:b].tolist()
            assert row["labels"][a] == -100, "the first token of a document is not a target"
            if set(tokens) == {60}:
                assert set(row["labels"][a:b].tolist()) == {-100}
            else:
                assert row["labels"][a + 1 : b].tolist() == tokens[1:]
                found.append(tokens)
    assert sorted(found) == sorted(e["input_ids"] for e in data)
    assert len(pack.dataset(data)) == len(rows)


def test_every_batch_has_one_form():
    pack = PackToBudget(16, max_documents=4)
    batches = [pack([row]) for row in pack.rows(examples(LENGTHS * 3))]
    assert len({(tuple(b["cu_seq_lens_q"].shape), b["max_length_q"]) for b in batches}) == 1
    for batch in batches:
        offsets = batch["cu_seq_lens_q"]
        assert offsets[0] == 0 and offsets[-1] == 16 and (offsets.diff() >= 0).all()
        assert offsets.diff().max() <= batch["max_length_q"]


@pytest.mark.parametrize("longer, left", [("cut", 2), ("drop", 1)])
def test_longer_examples_are_counted(longer, left):
    pack = PackToBudget(8, max_length=5, longer=longer)
    rows = list(pack.rows(examples((3, 7))))
    documents = sum(int((row["labels"] != -100).sum()) for row in rows)
    assert (pack.cut, pack.dropped) == ((1, 0) if longer == "cut" else (0, 1))
    assert documents == (2 + 4 if longer == "cut" else 2) and left == pack.cut + 1


@pytest.mark.parametrize(
    "example, named",
    [
        ({"input_ids": list(range(9))}, "max_length=8"),
        ({"text": "hello"}, "tokenize the text"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "no padding"),
        ({"input_ids": []}, "one dimension"),
        ({"input_ids": [1, 2], "labels": [1]}, "one label per token"),
    ],
)
def test_bad_examples_are_refused(example, named):
    with pytest.raises(ValueError, match=named):
        list(PackToBudget(8).rows([example]))


def test_a_batch_of_examples_that_are_not_packed_is_refused():
    for rows in ([], examples()):
        with pytest.raises(ValueError, match="a batch is made of packed rows"):
            PackToBudget(16)(rows)
    with pytest.raises(ValueError, match="tokens is of type float, not int"):
        PackToBudget(16.5)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_documents_alone(name):
    """Loss and gradients of one packed batch, captured, and of the documents one by one, eagerly."""
    data, plain, packed_model = examples(), model_of(name, MODELS[name]), model_of(name, MODELS[name])
    total = 0
    for example in data:
        tokens = torch.tensor([example["input_ids"]])
        if tokens.shape[1] > 1:
            loss = plain(input_ids=tokens, labels=tokens).loss * (tokens.shape[1] - 1)
            total += loss.item()
            loss.backward()
    attend_within_documents(packed_model)
    pack = PackToBudget(40, max_documents=8, max_length=12)
    batch = pack(list(pack.rows(data)))
    targets = int((batch["labels"] != -100).sum())
    step = stepgraph.capture(
        packed_model, lambda model, batch: model(**batch, use_cache=False).loss * targets, batch, passes="exact"
    )
    assert step(batch).item() == pytest.approx(total, rel=1e-5)
    used = [n for n in step.graph.graph.nodes if n.target is torch.ops.stepgraph.document_attention.default]
    assert len(used) == 2, "each layer attends by the operator"
    for (what, p), q in zip(plain.named_parameters(), packed_model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4, msg=lambda text, what=what: f"{what}: {text}")


def test_other_batches_run_as_before():
    model, tokens = model_of("Qwen3Config", MODELS["Qwen3Config"]), torch.randint(1, VOCAB, (2, 6))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    before = model(input_ids=tokens, attention_mask=mask).logits
    attend_within_documents(model)
    torch.testing.assert_close(model(input_ids=tokens, attention_mask=mask).logits[mask > 0], before[mask > 0])


def test_a_model_that_mixes_documents_is_refused():
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match=r"MambaForCausalLM cannot run packed documents") as error:
        attend_within_documents(transformers.MambaForCausalLM(config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_across_documents_is_seen_whatever_the_dtype(dtype):
    """Of weights just drawn it moves results by less than bf16 rounds."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    layers = ["conv", "full_attention"]
    config = transformers.Lfm2Config(vocab_size=VOCAB, num_hidden_layers=2, layer_types=layers, **sizes)
    with pytest.raises(ValueError, match="a document sees those before it"):
        attend_within_documents(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype))


def test_one_capture_serves_a_training(tmp_path):
    model, pack = model_of("Qwen3Config", MODELS["Qwen3Config"]), PackToBudget(32, max_documents=8)
    attend_within_documents(model)
    lengths = torch.randint(2, 20, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    arguments = transformers.TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=1, save_strategy="no",
        num_train_epochs=1, logging_steps=1,
    )  # fmt: skip
    rows = pack.dataset(examples(lengths))
    assert rows.share > 0.8
    trainer = GraphTrainer(model=model, args=arguments, train_dataset=rows, data_collator=pack, passes="exact")
    trainer.train()
    assert trainer.state.global_step == len(rows) > 5
    assert len(trainer.captured._forms) == 1, "one form serves every batch, the last one too"
