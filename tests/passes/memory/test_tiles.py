"""A step in tiles of the sequence is the step: losses and gradients are eager's but for rounding, in less memory."""

import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.costs.hardware import GPUS
from stepgraph.costs.memory import peak_bytes
from stepgraph.lower import StepSpec, copied, rewrite, trace
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions, Target, configured
from stepgraph.passes.memory.rows import Rows, Tile, Tokens
from stepgraph.passes.options import check_step

VOCABULARY = 37
TINY = Llama3Config(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=VOCABULARY, max_seq_len=16)
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY)
GROUPED = SIZES | dict(num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0)


def hugging_face(name, attention, **config):
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, f"{name}Config")(**config, attn_implementation=attention)
    return getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(made)


def labels_loss(model, batch):
    return model(input_ids=batch["tokens"], labels=batch["targets"]).loss


class Mixer(nn.Module):
    """Blocks that mix tokens between products, write in place and draw numbers; samples, tokens and channels are as
    many, so that sizes say nothing."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.mix = nn.Parameter(torch.randn(width, width))

        def forward(self, x):
            x = x + F.dropout(self.b(F.gelu(self.a(self.norm(x)))), 0.2)
            x = x + (x.transpose(1, 2) @ self.mix).transpose(1, 2) + torch.roll(x, 1, 1) * x.mean(1, True)
            y = F.silu(self.b(self.a(x).mul_(2).add_(1)))
            return x + y.cumsum(1) + y.softmax(-1)

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, width), nn.ModuleList(self.Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixer_loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def with_frozen_table():
    """The first norm gets a gradient, and what it reads does not."""
    model = Mixer()
    model.embed.requires_grad_(False)
    return model


CASES = {
    "frozen table": (with_frozen_table, mixer_loss),
    "llama": (lambda: Llama3(TINY), next_token_loss),
    "mixer": (Mixer, mixer_loss),
    "hf llama": (lambda: hugging_face("Llama", "sdpa", **GROUPED), labels_loss),
    "hf qwen3": (lambda: hugging_face("Qwen3", "eager", **GROUPED, head_dim=8), labels_loss),
    "hf gpt2": (
        lambda: hugging_face("GPT2", "sdpa", n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32),
        labels_loss,
    ),
}


def captured(model, loss, batch, tiles, memory="none", optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    passes = configured("default", inductor="off", norm="eager", tiles=tiles, memory=memory)
    return stepgraph.capture(model, loss, batch, optimizer, passes=passes, **options)


def made(case, dtype=torch.float64, samples=2, length=8):
    """(model, its eager twin, loss, batch)."""
    torch.manual_seed(0)
    build, loss = CASES[case]
    model = build().to(dtype).train()
    ids = torch.randint(1, VOCABULARY, (samples, length + 1))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    return model, copy.deepcopy(model), loss, batch


def eager(model, loss, batch):
    torch.manual_seed(1)
    value = loss(model, batch)
    value.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0 if p.grad is None else p.grad
    return value.detach()


def report_of(step):
    return next(report for report in step.report if report.name == "tile_sequence")


def test_gradients_that_clipping_and_the_optimizer_write():
    """torch's fused optimizers say that they write over the gradients."""
    model, _, loss, batch = made("llama")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    report = report_of(captured(model, loss, batch, 4, "full", optimizer, max_grad_norm=1.0))
    assert report.changed == report.matched, report.notes


@pytest.mark.parametrize(
    ("name", "samples", "tiles", "memory"),
    [
        ("llama", 2, 4, "none"),
        ("llama", 1, 3, "full"),
        ("mixer", 8, 2, "none"),
        ("mixer", 1, 3, "selective"),
        ("frozen table", 2, 2, "none"),
        ("hf llama", 2, 5, "selective"),
        ("hf qwen3", 1, 2, "full"),
        ("hf qwen3", 4, 2, "none"),
        ("hf gpt2", 2, 2, "none"),
    ],
)
def test_loss_and_update_are_those_of_eager(name, samples, tiles, memory):
    """In fp64, where a wrong row or a sum that lacks a tile is far outside of rounding."""
    model, twin, loss, batch = made(name, samples=samples)
    step = captured(model, loss, batch, tiles, memory)
    torch.manual_seed(1)
    near = 1e-12 if name in ("mixer", "frozen table") else 2e-6  # losses of language models are computed in fp32
    torch.testing.assert_close(step(batch), eager(twin, loss, batch), rtol=near, atol=near)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=near, atol=near)
    report = report_of(step)
    assert report.changed >= 7, report.notes
    if near == 1e-12:
        assert "2 x not in tiles: the result of aten.addmm is written in place by what is not in tiles" in report.notes
    else:
        assert report.changed == report.matched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_round_as_little_as_eager_and_repeat_every_bit(dtype):
    """Within a few roundings of a gradient's largest entry: a sum of four tiles is rounded four times."""
    model, twin, loss, batch = made("llama", dtype)
    other = copy.deepcopy(model)
    found = captured(model, loss, batch, 4)(batch)
    again = captured(other, loss, batch, 4)(batch)
    expected = eager(twin, loss, batch)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)
    assert torch.equal(found, again)
    for p, q, r in zip(model.parameters(), twin.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=8 * eps, atol=8 * eps * q.detach().abs().max().item())
        assert torch.equal(p, r)


def test_the_inside_of_a_layer_is_computed_in_tiles_and_named_in_the_report():
    model, _, loss, batch = made("llama")
    step = captured(model, loss, batch, 4)
    notes = report_of(step).notes
    assert "2 x forward of layers.*: 23 operators, 4 products" in notes
    assert any(note.startswith("not token-wise, so not tiled: 2 x aten._scaled_dot_product") for note in notes)
    values = [node.meta["val"] for node in step.graph.nodes("forward", "backward")]
    wide = [value.shape for value in values if isinstance(value, torch.Tensor) and value.ndim == 3]
    assert (1, 4, 24) in wide and all(shape.numel() <= 4 * 24 for shape in wide if shape[-1] == 24)


@functools.cache
def long():
    """(spec, captured program) of a Llama on 16,384 tokens, on fake tensors of a GPU."""
    config = dataclasses.replace(TINY, dim=256, n_heads=4, n_kv_heads=2, ffn_dim=1024, n_layers=2, max_seq_len=2**14)
    ids = torch.zeros(1, 2**14, dtype=torch.int64)
    spec = StepSpec(Llama3(config).bfloat16(), next_token_loss, {"tokens": ids, "targets": ids}, passes=StepOptions())
    return spec, trace(spec, Target.forecast(GPUS["h200"])).program


def forecast(**options):
    spec, program = long()
    spec = dataclasses.replace(spec, passes=StepOptions(**options))
    return rewrite(copied(program), spec, Target.forecast(GPUS["h200"]))


@pytest.mark.parametrize("memory", ["none", "full"])
def test_the_forecast_peak_falls_with_tiles(memory):
    peaks = [peak_bytes(forecast(memory=memory, tiles=tiles), fused=True) for tiles in (1, 2, 4)]
    assert peaks[0] > 1.3 * peaks[2] and peaks == sorted(peaks, reverse=True), peaks


def test_a_peak_that_takes_tiles_gets_them():
    with pytest.raises(ValueError, match=r"cannot be met.*ask for at least peak=") as refused:
        forecast(memory="peak=0.01GiB", tiles=1)
    least = float(re.search(r"at least peak=(.*)GiB,", str(refused.value)).group(1))
    program = forecast(memory=f"peak={0.9 * least:.4f}GiB")
    report = next(report for report in program.main.log if report.name == "tile_sequence")
    assert "in 4 tiles of 1 x 16384 tokens" in report.summary
    assert peak_bytes(program, fused=True) <= 0.9 * least * 2**30


def test_rows_of_a_tile():
    tokens = Tokens(2, 300)
    assert tokens.tiles(1) == [Tile(0, 2, 0, 300)] and tokens.tiles(2) == [Tile(0, 1, 0, 300), Tile(1, 2, 0, 300)]
    assert tokens.tiles(4) == [Tile(i, i + 1, *cut) for i in range(2) for cut in ((0, 256), (256, 300))]
    assert tokens.find((2, 4, 300, 8)) == Rows(0, 2) and tokens.find((600, 8)) == Rows(0, 0) and not tokens.find((8, 8))
    assert tokens.cut(Tile(1, 2, 256, 300), Rows(0, 0)) == [(0, 556, 600)]
    assert tokens.cut(Tile(1, 2, 256, 300), Rows(0, 2)) == [(0, 1, 2), (2, 256, 300)]


@pytest.mark.parametrize("tiles", [0, -1, 2.0, "many", True])
def test_tiles_that_are_no_number_are_refused(tiles):
    with pytest.raises(ValueError, match=r"tiles=.*; allowed: auto, or a number of tiles from 1 on"):
        check_step(StepOptions(tiles=tiles))


def test_tiles_are_not_exact():
    with pytest.raises(ValueError, match=r"tiles=4 with passes=exact"):
        check_step(StepOptions("exact", tiles=4))
