"""The example of docs/fine_tuning.md on a GPU, next to the same run of transformers' model in a plain loop there."""

import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
from stepgraph import cli  # noqa: E402
from tests.train.fine_tuning import STEPS, PlainLoop, make, records, tune  # noqa: E402

DEVICE = "cuda"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A folder in which the page's script has run."""
    folder = tmp_path_factory.mktemp("fine")
    make(folder)
    return folder


@pytest.mark.parametrize(
    ("precision", "rel", "strayed"), [("fp32", 1e-4, 0.02), ("bf16-autocast", 1e-2, 0.3), ("bf16", 1e-2, 0.3)]
)
def test_losses_are_those_of_transformers(example, precision, rel, strayed):
    """``rel``: of each loss. ``strayed``: how far all exported weights may be from those of the plain loop, as a share
    of the way that training moved them."""
    run, out = f"tuned-{precision}", f"out-{precision}"
    tune(example, "--device", DEVICE, "--precision", precision, "--out", run, "--export-hf", out)
    plain = PlainLoop(example, DEVICE, precision)
    start = [held.detach().clone() for held in plain.held]
    losses = [plain.step(lr) for lr in records(example / run, "lr")]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    assert records(example / run, "loss") == pytest.approx(losses, rel=rel)

    there = transformers.LlamaForCausalLM.from_pretrained(example / out, dtype=torch.float32).to(DEVICE)
    apart, way = (
        sum((a.detach().float() - b).square().sum().item() for a, b in zip(there.parameters(), others, strict=True))
        for others in ([held.detach() for held in plain.held], start)
    )
    assert (apart / way) ** 0.5 < strayed
    batch = plain.batch()
    with torch.no_grad():
        assert plain.loss(batch, there).item() == pytest.approx(plain.loss(batch).item(), rel=rel)
    tokenizer = transformers.AutoTokenizer.from_pretrained(example / out)
    assert tokenizer.decode([there.config.eos_token_id]) == "<|im_end|>" and tokenizer.chat_template


@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16"])
def test_preference_pairs(example, precision, capsys):
    """A run of DPO is compiled, puts its heads in parts, starts at log 2 and prefers the chosen answers."""
    rows = [
        {"prompt": f"What is {i} plus 1?", "chosen": f"It is {i + 1}.", "rejected": f"Maybe {i}?"} for i in range(400)
    ]
    (example / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = example / f"dpo-{precision}"
    words = ["--init-from-hf", example / "base", "--data", example / "pairs.jsonl", "--loss", "dpo", "--seq-len", 256]
    words += ["--lr", 1e-3, "--steps", 12, "--precision", precision, "--inductor", "full", "--saved-steps", "off"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *map(str, [*words, "--device", DEVICE, "--out", run])])
    assert stop.value.code == 0, capsys.readouterr().err
    losses = records(run, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=2e-2) and losses[-1] < 0.5
    assert records(run, "rewards/accuracies")[-1] > 0.9 and records(run, "val_rewards/margins")[-1] > 0
    assert (run / "passes.txt").read_text().count("log-probabilities of 1024 x 320 logits") == 2
