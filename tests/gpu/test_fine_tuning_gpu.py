"""The example of docs/fine_tuning.md on a GPU, beside the same run of transformers' model in a plain loop there."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
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
