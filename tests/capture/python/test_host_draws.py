"""Numbers that forward draws on the host and that enter as tensors are drawn in every step, as in eager."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError


def helper(shape, chance=0.5):
    """A function of a module that draws, and decides by what it drew."""
    mask = np.zeros(shape, bool)
    if np.random.rand() < chance:
        mask[:, np.random.randint(0, shape[1])] = True
    for row in range(shape[0]):
        mask[row, random.randrange(shape[1])] = True
    return mask


def spans(lengths):
    return np.stack([np.arange(6) < np.random.randint(1, n + 1) for n in lengths.tolist()])


def several(n):
    return np.random.rand(n), [random.random(), 3]


def made(n):
    return torch.from_numpy(np.random.rand(n).astype(np.float32))


def filled(m, x, mask, value):
    x = x.clone()
    x[mask] = value
    return x


def scaled(m, x):
    noise = np.random.randn(6)
    noise *= 0.5
    noise[2] = 0
    return x + torch.tensor(noise, dtype=torch.float32)


def two(m, x):
    drawn, (other, _) = several(6)
    return x * torch.tensor(drawn).float() + torch.tensor(other)


CAPTURED = {
    "compared": lambda m, x, n: x * torch.from_numpy((np.random.rand(6) > 0.5).astype(np.float32)),
    "function": lambda m, x, n: torch.where(torch.tensor(helper(tuple(x.shape))), 0.0, x),
    "lengths": lambda m, x, n: x * torch.as_tensor(spans(n)),
    "filled": lambda m, x, n: filled(m, x, torch.tensor(helper(tuple(x.shape))), 0),
    "filled_by_parameter": lambda m, x, n: filled(m, x, torch.tensor(helper(tuple(x.shape))[:, 0]), m.bias),
    "put": lambda m, x, n: x.index_put([torch.tensor(helper(tuple(x.shape)))], m.bias[0] * 2) + x,
    "number": lambda m, x, n: x * torch.tensor(random.random() * 2 - 1),
    "list": lambda m, x, n: x * torch.tensor([random.gauss(0, 1) for _ in range(6)]),
    "choice": lambda m, x, n: x * torch.tensor(random.choice([1.0, 2.0, 3.0])),
    "several": lambda m, x, n: two(m, x),
    "tensor": lambda m, x, n: x * made(6),
    "permutation": lambda m, x, n: x[:, torch.from_numpy(np.random.permutation(6))],
    "in_place": lambda m, x, n: scaled(m, x),
    "unused": lambda m, x, n: (np.random.rand(), x)[1],
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6), function

    def forward(self, batch):
        return self.function(self.inner, self.inner(batch["x"]), batch["n"])


def loss_fn(model, batch):
    return model(batch).square().mean()


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", CAPTURED)
def test_draws_are_those_of_eager(name, accumulate):
    torch.manual_seed(0)
    model = Model(CAPTURED[name])
    eager = copy.deepcopy(model)
    batches = [{"x": torch.randn(4, 6), "n": torch.randint(1, 7, (4,))} for _ in range(3)]
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager))
    random.seed(1), np.random.seed(1)
    before = states()
    step = stepgraph.capture(model, loss_fn, batches[0], ours, passes="exact", accumulate=accumulate)
    assert states() == before
    losses = [step(batch) for batch in batches]
    after = states()
    random.seed(1), np.random.seed(1)
    for batch, loss in zip(batches, losses, strict=True):
        parts = [loss_fn(eager, {k: v.chunk(accumulate)[i] for k, v in batch.items()}) / accumulate
                 for i in range(accumulate)]  # fmt: skip
        for part in parts:
            part.backward()
        theirs.step(), theirs.zero_grad()
        assert torch.equal(loss, sum(part.detach() for part in parts))
    assert states() == after != before
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert len(step._forms) == 1
    if accumulate == 1:
        assert step.verify(batches[0]).bitwise


def shared(m, x, n):
    drawn = np.random.rand(6)
    tensor = torch.from_numpy(drawn)
    drawn += 1
    return x * tensor.float()


def shuffled(m, x, n):
    order = list(range(6))
    random.shuffle(order)
    return x[:, torch.tensor(order)]


def seeded(m, x, n):
    np.random.seed(3)
    return x * torch.tensor(np.random.rand())


REFUSED = {
    "branch": lambda m, x, n: x if random.random() < 0.5 else -x,
    "factor": lambda m, x, n: x * random.random(),
    "of_activations": lambda m, x, n: x * torch.tensor(np.random.rand(int(x.sum() > 0) + 1)).sum(),
    "shared": shared,
    "shuffled": shuffled,
    "seeded": seeded,
    "checkpoint": lambda m, x, n: torch.utils.checkpoint.checkpoint(
        lambda x: x * torch.tensor(random.random()), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_are_refused(name):
    before, rand, tensor = states(), np.random.rand, torch.tensor
    with pytest.raises(CaptureError, match=r"test_host_draws.py:\d+") as caught:
        stepgraph.capture(Model(REFUSED[name]), loss_fn, {"x": torch.randn(4, 6), "n": torch.ones(4)}, passes="exact")
    assert "\n" not in str(caught.value)
    assert (states(), np.random.rand, torch.tensor) == (before, rand, tensor)


def test_a_draw_of_another_size_is_refused_when_it_comes():
    """The size of what was drawn is a constant of the graph, and may have been read."""
    model = Model(lambda m, x, n: x * np.flatnonzero(np.random.rand(6) < 0.5).size)
    np.random.seed(0)
    batch = {"x": torch.randn(4, 6), "n": torch.ones(4)}
    step = stepgraph.capture(model, loss_fn, batch, passes="exact")
    with pytest.raises(CaptureError, match=r"draws ndarray .* and drew ndarray .* draw equally many"):
        for _ in range(9):
            step(batch)


def test_speech_masks_spans_by_spec_augment():
    transformers = pytest.importorskip("transformers", minversion="5.20")
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_stride=(4, 4), conv_kernel=(8, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2, vocab_size=20, mask_time_prob=0.3, mask_time_length=3, mask_feature_prob=0.3,
        mask_feature_length=2, layerdrop=0.0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).train()
    batches = [
        {
            "input_values": torch.randn(2, 800),
            "labels": torch.randint(1, 20, (2, 5)),
            "attention_mask": (torch.arange(800) < torch.tensor([[800], [length]])).long(),
        }
        for length in (600, 500)
    ]
    step = stepgraph.capture(model, lambda m, b: m(**b).loss, batches[0], passes="exact")
    assert all(step.verify(batch).bitwise for batch in batches)
    assert len(step._forms) == 1  # the lengths are read when the masks are drawn
