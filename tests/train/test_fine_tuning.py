"""The example of docs/fine_tuning.md, followed, and next to the same run of transformers' model in a plain loop."""

import json
import re
from pathlib import Path

import pytest
import torch

from stepgraph import cli
from stepgraph.config.train import TrainConfig
from stepgraph.train.compile import is_chat
from stepgraph.train.data import PackedLoader, open_data
from stepgraph.train.start import with_document_mask

transformers = pytest.importorskip("transformers")
from tests.train.fine_tuning import STEPS, PlainLoop, make, records, tune  # noqa: E402


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A folder in which the page's script has run and its command with fewer steps."""
    folder = tmp_path_factory.mktemp("fine")
    make(folder)
    samples = ["--val-every", "4", "--sample-every", "4", "--sample-prompt", "What is 2 plus 3?"]
    tune(folder, "--device", "cpu", *samples)
    return folder


def test_losses_are_those_of_transformers(example):
    """fp32 on both sides; sums in another order differ by some 1e-7, which 8 steps of AdamW let grow."""
    plain = PlainLoop(example)
    losses = [plain.step(lr) for lr in records(example / "tuned", "lr")]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    assert records(example / "tuned", "loss") == pytest.approx(losses, rel=1e-5)

    out = transformers.LlamaForCausalLM.from_pretrained(example / "out", dtype=torch.float32)
    for (name, ours), theirs in zip(out.named_parameters(), plain.params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(example / "out")
    assert tokenizer.decode([out.config.eos_token_id]) == "<|im_end|>"
    assert tokenizer.chat_template


def test_targets_are_what_the_assistant_says(example):
    """Rows, read back to text: every conversation once an epoch, whole, and only answers are targets."""
    name = str(example / "base" / "tokenizer.json")
    data = open_data(str(example / "chat.jsonl"), name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(example / "base")
    loader = PackedLoader(data.source, data.tokenizer, batch_size=1, seq_len=128)
    seen, rows = [], 0  # the row that opens the second epoch is read and not counted
    while (batch := next(loader)) and loader.epoch == 0:
        rows += 1
        text = tokenizer.decode(batch["tokens"][0])
        seen += [part for part in re.split(r"(?=<\|im_start\|>user)|(?:<\|endoftext\|>)+", text) if part]
        said = tokenizer.decode(batch["targets"][0][batch["targets"][0] >= 0])
        assert said == "".join(answer + "<|im_end|>\n" for answer in re.findall(r"It is \d+\.", text))
    kept = (json.loads(data.source.read(int(index))) for index in data.source.train)
    assert sorted(seen) == sorted(tokenizer.apply_chat_template(messages, tokenize=False) for messages in kept)
    assert rows < len(seen) / 3  # they are packed


def test_an_answer_is_that_of_transformers(example, capsys, monkeypatch):
    monkeypatch.chdir(example)  # the run's tokenizer is base/tokenizer.json
    words = [
        "sample",
        "tuned",
        "--chat",
        "--prompt",
        "What is 2 plus 3?",
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
    ]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    said = capsys.readouterr().out
    model = transformers.LlamaForCausalLM.from_pretrained(example / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(example / "out")
    user = [{"role": "user", "content": "What is 2 plus 3?"}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert said == tokenizer.decode(made, skip_special_tokens=True) + "\n" and said.strip()
    # The run wrote some at its validations, the last one too; the losses above show that they changed nothing.
    samples = records(example / "tuned", "sample")
    assert samples and all(isinstance(sample, str) for sample in samples)


def test_conversations_are_kept_apart_unless_told_otherwise(example):
    """The run above said so, and ``stepgraph compile`` makes its step."""
    config = TrainConfig.from_json((example / "tuned" / "config.json").read_text())
    assert config.document_mask == "on"
    chat, text = str(example / "chat.jsonl"), str(example / "make.jsonl")
    Path(text).write_text('{"text": "a"}\n{"text": "b"}\n')
    capitals = str(Path(chat).rename(example / "CHAT.JSONL"))
    found = {data: is_chat(TrainConfig(data=data)) for data in (capitals, text, "stdlib")}
    Path(capitals).rename(chat)
    assert found == {capitals: True, text: False, "stdlib": False}
    assert with_document_mask(TrainConfig(), chat=False).document_mask == "auto"
    assert with_document_mask(TrainConfig(document_mask="off"), chat=True).document_mask == "off"
