"""Batches padded to a few lengths: the loss and gradients of the batch as it was, few captures, least padding."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import stepgraph
from stepgraph.integrations import GraphTrainer, PadToLengths
from stepgraph.lower.lengths import NOT_TRACED

transformers = pytest.importorskip("transformers")

VOCAB = 61
SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def qwen():
    config = transformers.Qwen3Config(vocab_size=VOCAB, head_dim=8, num_key_value_heads=2, **SHAPE)
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def bert():
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **SHAPE, **off))


def classifier():
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.BertConfig(vocab_size=VOCAB, num_labels=3, problem_type="multi_label_classification", **SHAPE)
    config.update(off)
    return transformers.BertForSequenceClassification(config)


def t5():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def ids(*shape, seed=1):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def rows(*lengths, side="right"):
    """A batch padded to its longest row, as collate functions make it."""
    size = max(lengths)
    inputs, positions = ids(len(lengths), size), torch.arange(size)
    real = torch.stack([positions < n if side == "right" else positions >= size - n for n in lengths])
    return {
        "input_ids": inputs.where(real, 0),
        "attention_mask": real.long(),
        "labels": inputs.where(real, -100),
    }


def without_mask(batch):
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def loss_of(model, batch):
    return model(**batch, **({} if model.config.is_encoder_decoder else {"use_cache": False})).loss


CASES = {
    "causal": (qwen, lambda: without_mask(rows(11, 11)), dict(causal=True), 16),
    "causal, mask that hides padding": (qwen, lambda: rows(11, 7), dict(causal=True), 16),
    "causal, padded on the left": (qwen, lambda: rows(11, 7, side="left"), dict(causal=True), 16),
    "mask kept": (qwen, lambda: rows(11, 7), {}, 16),
    "positions": (
        qwen,
        lambda: without_mask(rows(11, 11)) | {"position_ids": torch.arange(11).expand(2, 11).clone()},
        dict(causal=True, pad_token_id=3),
        16,
    ),
    "learned positions": (gpt2, lambda: rows(9, 5), {}, 16),
    "masked LM": (bert, lambda: rows(11, 6) | {"token_type_ids": ids(2, 11) % 2}, {}, 16),
    "one label for each class": (
        classifier,
        lambda: {**rows(11, 6), "labels": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])},
        {},
        16,
    ),
    "encoder and decoder": (t5, lambda: {**rows(11, 6), "labels": rows(5, 3)["labels"]}, {}, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_batch_as_it_was(case):
    """Eager on the batch as it was, against the captured step on the padded one; in fp64, but for the loss, whose
    logits transformers rounds to fp32. The padding's tokens are then changed, which must not change anything."""
    build, make, options, size = CASES[case]
    torch.manual_seed(0)
    eager = build().double()
    captured = copy.deepcopy(eager)
    batch = make()
    loss = loss_of(eager, batch)
    loss.backward()
    padded = PadToLengths((8, size), **options)(batch)
    assert padded["input_ids"].shape == (2, size) and batch["input_ids"].shape[1] < size
    step = stepgraph.capture(captured, loss_of, padded, passes="exact")
    torch.testing.assert_close(step(padded), loss.detach(), rtol=1e-6, atol=0)
    first = [p.grad.clone() for p in captured.parameters()]
    for p, q in zip(first, eager.parameters(), strict=True):
        torch.testing.assert_close(p, q.grad, rtol=1e-5, atol=1e-7)
    captured.zero_grad()
    padded["input_ids"][:, batch["input_ids"].shape[1] :] = 5
    if case != "one label for each class":
        assert step(padded).item() == pytest.approx(loss.item(), rel=1e-6)


def test_which_masks_a_causal_model_does_without():
    pad = PadToLengths((16,), causal=True)
    assert "attention_mask" not in pad(rows(11, 7))
    assert "attention_mask" in pad(rows(11, 7, side="left"))
    counted = rows(11, 7)
    counted["labels"] = counted["input_ids"].clone()  # the loss of the padding depends on what it sees
    assert "attention_mask" in pad(counted)
    assert "attention_mask" in PadToLengths((16,))(rows(11, 7))
    assert "attention_mask" not in pad(without_mask(rows(11, 11)))


def test_what_follows_each_tensor():
    batch = rows(5, 3) | {
        "position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]),
        "inputs_embeds": torch.ones(2, 5, 3),
        "weights": torch.ones(2, 5),
        "pixels": torch.ones(2, 5),
        "classes": torch.tensor([1, 2]),
        "names": ["a", "b"],
    }
    before = copy.deepcopy(batch)
    padded = PadToLengths((4, 7), pad_token_id=9, fill={"weights": 0.5, "pixels": None})(batch)
    assert padded["input_ids"][:, 5:].tolist() == [[9, 9]] * 2
    assert padded["labels"][:, 5:].tolist() == [[-100, -100]] * 2
    assert padded["attention_mask"][:, 5:].tolist() == [[0, 0]] * 2
    assert padded["position_ids"][:, 5:].tolist() == [[5, 6], [3, 4]]
    assert padded["inputs_embeds"].shape == (2, 7, 3) and not padded["inputs_embeds"][:, 5:].any()
    assert padded["weights"][:, 5:].tolist() == [[0.5, 0.5]] * 2
    assert all(padded[name] is batch[name] for name in ("pixels", "classes", "names"))
    for name, value in before.items():  # what was given is as it was
        assert torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else batch[name] == value
    exact = PadToLengths((5,), fill={"weights": 0.0, "pixels": None})(batch)
    assert exact["input_ids"] is batch["input_ids"]


def test_a_loss_of_preferences_keeps_its_mask():
    """As TRL's collator for preferences gives it, without labels."""
    batch = {name: torch.ones(2, 5, dtype=torch.int64) for name in ("input_ids", "attention_mask", "completion_mask")}
    padded = PadToLengths([8], causal=True)(batch)
    assert set(padded) == set(batch) and all(value.sum() == 10 for n, value in padded.items() if "mask" in n)


@pytest.mark.parametrize(
    ("lengths", "batch", "message"),
    [
        ((4, 8), lambda: rows(9, 3), r"input_ids of length 9 is longer than the largest of lengths=\(4, 8\): add a"),
        ((16,), lambda: without_mask(rows(9, 3)), "no attention_mask, so tokens would see the padding: use causal"),
        ((16,), lambda: rows(9) | {"other": torch.ones(1, 9)}, r"fill=\{'other': 0\}, or that nothing does"),
        ((16,), lambda: {"input_ids": ids(1, 9), "attention_mask": ids(1, 9)}, "no labels, so the loss would count"),
        (
            (16,),
            lambda: rows(9) | {"attention_mask": torch.ones(1, 1, 9, 9)},
            r"attention_mask of shape \(1, 1, 9, 9\)",
        ),
        ((16,), lambda: rows(9) | {"position_ids": torch.ones(3, 1, 9)}, r"position_ids of shape \(3, 1, 9\)"),
        ((16,), lambda: rows(9) | {"cu_seq_lens_q": torch.ones(3)}, "cu_seq_lens_q, of sequences packed into one row"),
    ],
)
def test_what_is_refused(lengths, batch, message):
    with pytest.raises(ValueError, match=message):
        PadToLengths(lengths)(batch())


@pytest.mark.parametrize("lengths", [(), (0, 4), (2.5,), 8, "8"])
def test_lengths_that_cannot_be(lengths):
    with pytest.raises(ValueError, match="use positive integers"):
        PadToLengths(lengths)


@pytest.mark.slow
def test_any_length_in_trainer(tmp_path):
    """Batches of many lengths, with masks and accumulation: trained as by Trainer, and most lengths are not traced."""
    examples = [{"input_ids": ids(n, seed=n).tolist()} for n in range(4, 52)]

    def collate(rows):
        size = max(len(row["input_ids"]) for row in rows)
        inputs = torch.tensor([row["input_ids"] + [0] * (size - len(row["input_ids"])) for row in rows])
        real = torch.tensor([[i < len(row["input_ids"]) for i in range(size)] for row in rows])
        return {"input_ids": inputs, "labels": inputs.where(real, -100), "attention_mask": real.long()}

    torch.manual_seed(0)
    models = [qwen()]
    models.append(copy.deepcopy(models[0]))
    for kind, model in zip((transformers.Trainer, GraphTrainer), models, strict=True):
        arguments = transformers.TrainingArguments(
            tmp_path / kind.__name__, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=12,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        own = {"passes": stepgraph.StepOptions(any_length=True)} if kind is GraphTrainer else {}
        trainer = kind(model=model, args=arguments, train_dataset=examples, data_collator=collate, **own)
        trainer.train()
    forms = [bound.traced.program for step in trainer._apart.values() for bound in step._forms]
    notes = [note for program in forms for report in program.reports for note in report.notes]
    assert len(forms) == 24
    assert sum(note == NOT_TRACED for note in notes) == 18
    torch.testing.assert_close(*(list(model.parameters()) for model in models), rtol=1e-3, atol=1e-4)


def test_a_run_of_many_lengths_is_captured_twice():
    """A loader whose batches have eleven lengths trains as eager does on the batches as they were."""
    torch.manual_seed(0)
    eager = qwen().double()
    captured = copy.deepcopy(eager)
    examples = [ids(n, seed=n) for n in range(4, 26)]

    def collate(examples):
        size = max(map(len, examples))
        inputs = torch.stack([torch.nn.functional.pad(row, (0, size - len(row))) for row in examples])
        real = torch.stack([torch.arange(size) < len(row) for row in examples])
        return {"input_ids": inputs, "labels": inputs.where(real, -100), "attention_mask": real.long()}

    pad = PadToLengths((16, 32), collate, causal=True)
    loaders = [DataLoader(examples, 2, collate_fn=function) for function in (collate, pad)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in (eager, captured)]
    step = stepgraph.capture(captured, loss_of, next(iter(loaders[1])), optimizers[1], passes="exact")
    for batch, padded in zip(*loaders, strict=True):
        loss = loss_of(eager, batch)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert step(padded).item() == pytest.approx(loss.item(), rel=1e-6)
    assert len(step._forms) == 2
    for p, q in zip(captured.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_graph_trainer_beside_the_plain_trainer_without_padding(tmp_path):
    pytest.importorskip("accelerate")
    from stepgraph.integrations import GraphTrainer

    data = [{"input_ids": (row := ids(n, seed=n)), "labels": row} for n in (5, 9, 20, 4, 17, 30, 11, 8)]

    def collate(examples):
        size = max(len(e["input_ids"]) for e in examples)
        fill = {"input_ids": 0, "labels": -100}
        return {
            name: torch.stack([torch.nn.functional.pad(e[name], (0, size - len(e[name])), value=v) for e in examples])
            for name, v in fill.items()
        }

    logs = []
    for kind, collator in (
        (transformers.Trainer, collate),
        (GraphTrainer, PadToLengths((16, 32), collate, causal=True)),
    ):
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            str(tmp_path / kind.__name__), per_device_train_batch_size=2, num_train_epochs=2, logging_steps=1,
            report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        own = {"passes": "exact"} if kind is GraphTrainer else {}
        trainer = kind(model=qwen(), args=arguments, train_dataset=data, data_collator=collator, **own)
        trainer.train()
        logs.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history[:-1]])
    assert len(trainer.captured._forms) == 2
    for ours, plain in zip(*reversed(logs), strict=True):
        assert ours == pytest.approx(plain, rel=1e-4)
