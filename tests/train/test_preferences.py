"""``stepgraph train --loss dpo``: pairs packed into rows, a frozen reference, and the losses of TRL."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stepgraph import cli
from stepgraph.models.loss import PAIR_TOKENS
from stepgraph.train.data import PackedLoader, open_data, validation_batches
from stepgraph.train.data.token_cache import Pairs

transformers = pytest.importorskip("transformers")
from tests.train.fine_tuning import make, records  # noqa: E402

BETA, SMOOTH, LR = 0.3, 0.1, 3e-3


def rows(form, n=14):
    """Sums, of which the chosen answer is right, in one of the forms that data sets have."""
    for a, b in [(i % 7, i % 5) for i in range(n)]:
        prompt, *answers = f"What is {a} plus {b}?", f"It is {a + b}.", f"It is {a + b + 1}, maybe {a}."
        asked, said = {"role": "user", "content": prompt}, [{"role": "assistant", "content": x} for x in answers]
        whole = {"chosen": [asked, said[0]], "rejected": [asked, said[1]]}
        yield {
            "strings": {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]},
            "messages": {"prompt": [asked], "chosen": said[:1], "rejected": said[1:]},
            "conversations": whole,
            "both": {"prompt": prompt, "messages": whole["chosen"], **whole},  # as ultrafeedback_binarized
        }[form]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs in each form; a small Qwen3 and another one with its tokenizer, and a Llama."""
    folder = tmp_path_factory.mktemp("preferences")
    make(folder)
    for form in ("strings", "messages", "conversations", "both"):
        (folder / f"{form}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(form)))
    shape = dict(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    shape |= dict(intermediate_size=48, num_key_value_heads=2, max_position_embeddings=1024)
    for seed, name in enumerate(("policy", "other")):
        shutil.copytree(folder / "base", folder / name)
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
        for p in model.parameters():  # far enough from uniform for rewards that are seen
            torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
        model.save_pretrained(folder / name)
    return folder


def train(folder, *options):
    words = ["--data", folder / "strings.jsonl", "--val-data", folder / "messages.jsonl", "--loss", "dpo"]
    words += ["--beta", BETA, "--label-smoothing", SMOOTH, "--seq-len", 128, "--batch-size", 2, "--lr", LR]
    words += ["--steps", 4, "--warmup-steps", 0, "--schedule", "constant", "--device", "cpu", "--passes", "exact"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *map(str, [*words, "--saved-steps", "off", *options])])
    return stop.value.code


@pytest.mark.parametrize("form", ["messages", "conversations", "both"])
def test_every_form_gives_the_same_rows(folder, form):
    tokenizer = str(folder / "base" / "tokenizer.json")
    texts = [open_data(str(folder / f"{f}.jsonl"), tokenizer, "chosen,rejected", 128) for f in ("strings", form)]
    assert all(data.source.pairs for data in texts)
    read = ([*data.source.texts("train"), *data.source.texts("val")] for data in texts)
    one, other = ([texts[0].tokenizer.encode(text) for text in some] for some in read)
    assert len(one) == 14
    assert sorted(map(bytes, one)) == sorted(map(bytes, other))


def test_rows_hold_whole_pairs_in_turn(folder):
    data = open_data(str(folder / "strings.jsonl"), str(folder / "base" / "tokenizer.json"), "chosen,rejected", 256)
    tokenizer, seen = transformers.AutoTokenizer.from_pretrained(folder / "base"), []
    loader = PackedLoader(data.source, data.tokenizer, batch_size=1, seq_len=256, positions=True)
    while (batch := next(loader)) and loader.epoch == 0:
        of = (batch["positions"][0] == 0).cumsum(0) - 1
        said = [tokenizer.decode(batch["targets"][0][(of == i) & (batch["targets"][0] >= 0)]) for i in range(32)]
        said = [text for text in said if text]
        assert batch["pairs_per_row"] == len(said) / 2
        assert all("maybe" not in text for text in said[::2]) and all("maybe" in text for text in said[1::2])
        assert all(text.startswith("It is") and text.endswith("<|im_end|>\n") for text in said)
        seen += said
    assert 2 * len(data.source.train) >= len(seen) > 0
    small = validation_batches(data.source, data.tokenizer, batch_size=1, seq_len=256, n=9, positions=True)
    assert len({float(one["pairs_per_row"]) for one in small}) == 1


def test_what_no_row_holds_is_left_out_and_told(folder, tmp_path):
    """Of 96 tokens a row has 48 for each answer: these are cut, and left out where nothing of an answer remains."""
    good = {"prompt": "a", "chosen": "b" * 90, "rejected": "c"}
    lines = [good, good, good | {"rejected": ""}, {"prompt": "a" * 99, "chosen": "b", "rejected": "c"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = open_data(str(tmp_path / "long.jsonl"), str(folder / "base" / "tokenizer.json"), "chosen,rejected", 96)
    stream = Pairs(data.tokenizer.eos_id, 96)
    tokens = stream.add([data.tokenizer.encode(data.source.read(i)) for i in range(4)])
    assert stream.counts == {"cut": 2, "cut out": 1, "silent": 1}
    assert "2 preference pairs are cut to seq_len=96 tokens (half of it, 48, for each answer)" in stream.told
    assert stream.begins[:2] == [0, 48] and stream.begins[3] == 96 and stream.begins[4] == 96 + 48
    assert len(stream.begins) == 5 and 96 + 48 < len(tokens) < 192
    stream = Pairs(0, 96)
    assert len(stream.add([np.array([~2, ~5, 6, ~5, 7])])) == PAIR_TOKENS and stream.begins == [0, 2]


def plain_losses(folder, pairs, reference, steps=4):
    """DPO in a loop of transformers' own model, one answer at a time, as the papers have it."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    policy, frozen = load(folder / "policy", dtype=torch.float32), load(folder / reference, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)

    def log_prob(model, row, name):
        asked = [{"role": "user", "content": row["prompt"]}]
        said = [*asked, {"role": "assistant", "content": row[name]}]
        ids, start = (
            tokenizer.apply_chat_template(m, add_generation_prompt=m is asked, return_dict=False) for m in (said, asked)
        )
        ids = torch.tensor([ids])
        logs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return logs[len(start) - 1 :].sum()

    losses = []
    for _ in range(steps):
        with torch.no_grad():
            base = [[log_prob(frozen, row, name) for name in ("chosen", "rejected")] for row in pairs]
        rewards = BETA * (
            torch.stack([log_prob(policy, row, name) for row in pairs for name in ("chosen", "rejected")]).view(-1, 2)
            - torch.tensor(base)
        )
        margin = rewards[:, 0] - rewards[:, 1]
        loss = (-(1 - SMOOTH) * F.logsigmoid(margin) - SMOOTH * F.logsigmoid(-margin)).mean()
        losses.append(
            (loss.item(), *rewards.mean(0).tolist(), margin.mean().item(), (margin > 0).float().mean().item())
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return policy, losses


NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@pytest.fixture(scope="module")
def whole(folder):
    """A data set of which a step reads all pairs, so that the order does not matter; and those pairs."""
    data = folder / "strings.jsonl"
    source = open_data(str(data), str(folder / "base" / "tokenizer.json"), "chosen,rejected", 128).source
    kept = [json.loads(line) for i, line in enumerate(data.read_text().splitlines()) if i in set(source.train.tolist())]
    return kept


def test_a_run_is_the_plain_loop(folder, whole, capsys):
    """Losses, rewards and weights, next to a reference of its own; bitwise as eager, again when resumed."""
    out, exported = folder / "run", folder / "out"
    options = ["--init-from-hf", folder / "policy", "--reference", folder / "other", "--seq-len", 640]
    options += ["--batch-size", 1, "--accumulate", 2, "--verify", "--checkpoint-every", 2, "--val-every", 2]
    assert train(folder, *options, "--out", out, "--export-hf", exported) == 0
    assert "bitwise equal" in capsys.readouterr().out
    policy, losses = plain_losses(folder, whole, "other")
    for name, expected in zip(NAMES, zip(*losses, strict=True), strict=True):
        assert records(out, name) == pytest.approx(expected, rel=2e-4, abs=1e-5), name
    assert abs(losses[0][0] - math.log(2)) > 0.05 and losses[-1][0] < losses[0][0]
    ours = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for (name, p), q in zip(ours.named_parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3, msg=name)
    assert len(records(out, "val_rewards/accuracies")) == 2 and records(out, "val_loss")

    config = json.loads((out / "config.json").read_text())
    assert config["loss"] == "dpo" and config["reference"] == str(folder / "other")
    losses = records(out, "loss"), records(out, "rewards/margins")
    words = ["train", "--resume", out / "checkpoints" / "step-00000002", "--export-hf", folder / "again"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*map(str, words)])
    assert stop.value.code == 0
    assert (records(out, "loss"), records(out, "rewards/margins")) == losses
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again", dtype=torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), again.parameters(), strict=True))


def test_an_adapter_needs_no_other_model(folder, capsys):
    """The reference is the model without its adapter: at the start no answer is preferred, later one is."""
    pytest.importorskip("peft")
    out = folder / "run-lora"
    options = ["--init-from-hf", folder / "policy", "--lora", "r=4,targets=q_proj+v_proj", "--seq-len", 256, "--verify"]
    assert train(folder, *options, "--lr", 3e-2, "--label-smoothing", 0, "--steps", 3, "--out", out) == 0
    assert "bitwise equal" in capsys.readouterr().out
    losses, margins = records(out, "loss"), records(out, "rewards/margins")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0] - 0.05
    assert margins[0] == 0 and margins[-1] > 0
    assert json.loads((out / "config.json").read_text())["reference"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "chat.jsonl"], "no field 'chosen' (it has messages): pairs are prompt, chosen and rejected"),
        (["--data", "stdlib"], "loss=dpo reads preference pairs and stdlib has none"),
        (["--loss", "cross-entropy"], "other is for --loss dpo"),
        (["--loss", "cross-entropy", "--reference", None], "beta=0.3 changes nothing: add --loss dpo"),
        (["--beta", 0], "beta=0.0 must be above 0"),
        (["--label-smoothing", 0.5], "label_smoothing=0.5 must be in [0, 0.5)"),
        (["--mesh", "tp=2"], "loss=dpo supports the axes ddp, fsdp and hsdp, and not the others of mesh=tp=2"),
        (["--document-mask", "off"], "document_mask=off would let each attend"),
        (["--text-field", "chosen"], "text_field=chosen is a field of text"),
        (["--seq-len", 16], "seq_len=16 is too short for a pair: try --seq-len 32"),
        (["--reference", "nowhere"], "reference=nowhere is not a folder"),
        (["--init-from-hf", None, "--reference", None], "loss=dpo starts from a trained model and there is none"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_one_line(folder, words, said, capsys):
    given = {"--init-from-hf": folder / "policy", "--reference": folder / "other"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    if given.get("--data") == "chat.jsonl":
        given["--data"] = folder / "chat.jsonl"
    given = [word for pair in given.items() if pair[1] is not None for word in pair]
    assert train(folder, *given, "--out", folder / "run-wrong") == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (folder / "run-wrong").exists()


@pytest.mark.long
def test_losses_are_those_of_trl(folder, whole, tmp_path):
    """The same pairs in one batch by `DPOTrainer`, which pads and, unlike the plain loop, has no label smoothing here:
    losses, rewards, margins of four steps."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    out = tmp_path / "run"
    options = ["--init-from-hf", folder / "policy", "--reference", folder / "other", "--seq-len", 640]
    options += ["--label-smoothing", 0, "--accumulate", 2, "--batch-size", 1]
    assert train(folder, *options, "--out", out) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    args = trl.DPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=len(whole),
        max_steps=4, save_strategy="no", logging_steps=1, beta=BETA, learning_rate=LR,
        lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0, adam_beta2=0.95, max_length=256,
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}]}
        | {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
        for row in whole
    ]
    trainer = trl.DPOTrainer(
        model=load(folder / "policy", dtype=torch.float32), ref_model=load(folder / "other", dtype=torch.float32),
        args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "base"),
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "rewards/chosen" in log]
    assert len(logs) == 4
    for name in NAMES:
        assert records(out, name) == pytest.approx([log[name] for log in logs], rel=1e-3, abs=2e-4), name
