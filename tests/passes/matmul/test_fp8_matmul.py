"""The pass fp8_matmul: the bits of eager fp8 layers, one cast for all that read it, and a reason for what it leaves."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.costs.fp8 import cast_seconds, product_seconds
from stepgraph.graph.step_graph import InputSpec
from stepgraph.graph.values import BatchLeaf
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions, configured, run_passes
from stepgraph.passes.contract import get
from stepgraph.passes.order import chosen
from tests.passes.matmul.eager_fp8 import product, quantized, swap

aten, ours = torch.ops.aten, torch.ops.stepgraph
RECIPES = ("tensorwise", "rowwise", "rowwise-bf16-weight-gradients")
LLAMA = Llama3Config(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=37, max_seq_len=16)


def passes(recipe, **options):
    """Those of ``--fp8``, which leave products as small as a test's alone but for ``unprofitable``."""
    own = {name: options.pop(name) for name in ("skip",) if name in options}
    found = configured(fp8=recipe, inductor="off", **options)
    return [p.with_options(unprofitable=True, **own) if p.name == "fp8_matmul" else p for p in found]


def report_of(step):
    return next(r for r in step.report if r.name == "fp8_matmul")


def count(step, target):
    return len(step.graph.graph.find_nodes(op="call_function", target=target))


def captured(model, loss_fn, batch, chosen, **options):
    """(step, the loss and the gradients of one step) of a copy of ``model``."""
    model = copy.deepcopy(model)
    step = stepgraph.capture(model, loss_fn, batch, passes=chosen, **options)
    return step, [step(batch), *(p.grad for p in model.parameters())]


def check_as_eager(model, loss_fn, batch, recipe, keep, layers):
    """The pass on ``model`` equals eager with `Fp8Linear` in all layers but ``keep``."""
    step, found = captured(model, loss_fn, batch, passes(recipe))
    eager = swap(copy.deepcopy(model), recipe, keep)
    loss = loss_fn(eager, batch)
    loss.backward()
    by_name = dict(eager.named_parameters())
    expected = [loss.detach(), *(by_name[name].grad for name, _ in model.named_parameters())]
    for name, mine, right in zip(["loss", *by_name], found, expected, strict=True):
        assert torch.equal(mine, right), name
    report = report_of(step)
    assert (report.matched, report.changed) == (layers + len(keep), layers)
    return step


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(model, batch)


def tokens(vocab=37, batch=4, length=8):
    ids = torch.randint(vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


@functools.cache
def llama(dtype=torch.float32):
    torch.manual_seed(0)
    return Llama3(LLAMA).to(dtype)


@pytest.mark.parametrize(
    ("precision", "recipe"), [*(("autocast", recipe) for recipe in RECIPES), ("bf16", "tensorwise")]
)
def test_llama_has_the_bits_of_eager_fp8_layers(precision, recipe):
    """Seven layers a block: four activations, seven weights and seven gradients are cast, once each."""
    model = llama(torch.float32 if precision == "autocast" else torch.bfloat16)
    loss_fn = autocast_loss if precision == "autocast" else next_token_loss
    step = check_as_eager(model, loss_fn, tokens(), recipe, ["head"], 7)
    bf16_weight_gradients = recipe.endswith("bf16-weight-gradients")
    assert count(step, ours.scaled_product.default) == 7 * (2 if bf16_weight_gradients else 3)
    cast = ours.cast_scaled if recipe == "tensorwise" else ours.cast_scaled_rows
    assert count(step, cast.default) == 4 + 7 + 7
    assert count(step, aten.mm.default) == 3 + 7 * bf16_weight_gradients
    notes = "\n".join(report_of(step).notes)
    assert "left in bf16, the loss reads it: head" in notes and "no linear layer" not in notes
    assert "output gradients by rows" in notes and ("transposed" in notes)


class Tower(nn.Module):
    """Biases; a layer that is called twice; one whose input needs no gradient."""

    def __init__(self, linear):
        super().__init__()
        self.first, self.twice, self.last = linear(16, 32), linear(32, 32), linear(32, 16)

    def forward(self, x):
        return self.last(F.gelu(self.twice(F.gelu(self.twice(F.gelu(self.first(x)))))))


def square(model, batch):
    return model(batch["x"]).float().square().mean()


def conv1d(inputs, outputs):
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(outputs, inputs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("linear", [nn.Linear, conv1d])
def test_biases_shared_layers_and_transposed_weights(recipe, linear):
    torch.manual_seed(0)
    model, batch = Tower(linear).bfloat16(), {"x": torch.randn(4, 8, 16).bfloat16()}
    step, found = captured(model, square, batch, passes(recipe))
    eager = swap(copy.deepcopy(model), recipe, ["last"])
    square(eager, batch).backward()
    by_name = dict(eager.named_parameters())
    for (name, _), mine in zip(model.named_parameters(), found[1:], strict=True):
        assert torch.equal(mine, by_name[name].grad), name
    assert (report_of(step).matched, report_of(step).changed) == (4, 3)  # uses of layers
    casts = (ours.cast_scaled if recipe == "tensorwise" else ours.cast_scaled_rows).default
    # Activations, weights, and the gradients of three outputs, of which the first is read by a weight gradient alone.
    assert count(step, casts) == 3 + 2 + (3 if recipe in RECIPES[:2] else 2)


def transformer(name):
    """(a tiny model of transformers, its loss, a batch)."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 37, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    own = {"GPT2": {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
    own = own.get(name, {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16})
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes | own)).bfloat16()
    batch = {"ids": torch.randint(37, (4, 8))}

    def loss_fn(model, batch):
        return model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss

    return model, loss_fn, batch


@pytest.mark.parametrize("name", ["Llama", "Qwen3", pytest.param("GPT2", marks=pytest.mark.long)])
def test_transformers(name):
    model, loss_fn, batch = transformer(name)
    check_as_eager(model, loss_fn, batch, "rowwise", ["lm_head"], 4 if name == "GPT2" else 7)


# What stays


def test_what_stays_in_bf16_is_said():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.skipped, self.inner = nn.Linear(32, 24), nn.Linear(32, 32), nn.Linear(32, 32)
            self.router, self.head = nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).topk(2)
            x = self.inner(x) + self.skipped(x) * weights.sum(-1, keepdim=True)
            return self.head(x + self.odd(x).sum(-1, keepdim=True) + chosen.sum())

    model, batch = Router().bfloat16(), {"x": torch.randn(32, 32).bfloat16()}
    step, _ = captured(model, square, batch, passes("tensorwise", skip=("skip*", "none.*")))
    report = report_of(step)
    assert (report.matched, report.changed) == (5, 1) and "1 of 5 linear layers in fp8" in report.line()
    for note in (
        "left in bf16, fp8_skip=skip*: skipped",
        "left in bf16, it chooses experts: router",
        "left in bf16, the loss reads it: head",
        "left in bf16, 32 x 24 x 32 is not a multiple of 16 in both dimensions: odd",
        "fp8_skip matches no linear layer: none.*",
    ):
        assert note in report.notes


def test_batched_products_with_a_parameter_are_named():
    """As torch multiplies rows that lie apart by a frozen weight."""

    class Batched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen = nn.Linear(32, 32), nn.Linear(32, 32, bias=False).requires_grad_(False)

        def forward(self, x):
            x = self.first(x)
            return x + torch.bmm(x, self.frozen.weight.t().expand(len(x), 32, 32))

    batch = {"x": torch.randn(2, 16, 32).bfloat16()}
    step, _ = captured(Batched().bfloat16(), square, batch, passes("rowwise"))
    notes = "\n".join(report_of(step).notes)
    assert "left in bf16: 1 products of forward that multiply by parameters in batches or groups (bmm)" in notes


def test_fp32_stays_fp32():
    step, _ = captured(llama(), next_token_loss, tokens(), passes("rowwise"))
    assert report_of(step).changed == 0 and not count(step, ours.scaled_product.default)
    assert any(note.startswith("left in float32, and fp8 replaces") for note in report_of(step).notes)


def test_small_products_cost_more_than_they_save():
    step, _ = captured(llama(torch.bfloat16), next_token_loss, tokens(), configured(fp8="rowwise", inductor="off"))
    report = report_of(step)
    assert report.changed == 0 and count(step, aten.mm.default) == 3 * 8
    assert any("32 x 48 x 32 saves nothing: 3 products in " in note for note in report.notes)


def test_the_cost_rule_knows_who_shares_a_cast():
    """A narrow layer does not pay by itself, and does where others read the same input."""

    def seconds(columns, readers):
        M, K = 8192, 2048
        saved = 3 * (product_seconds((M, columns, K), fp8=False) - product_seconds((M, columns, K), fp8=True))
        own = cast_seconds(M * columns, 2, reads=2) + cast_seconds(columns * K, 2, reads=2)
        return saved - own - cast_seconds(M * K, 2, reads=2) / readers

    assert seconds(4096, 1) > 0 > seconds(64, 1)
    assert any(seconds(columns, 1) < 0 < seconds(columns, 3) for columns in range(64, 4096, 64))


# How it goes with other passes


def test_recomputation_and_repetition_change_no_bit():
    model, batch = llama(torch.bfloat16), tokens()
    _, kept = captured(model, next_token_loss, batch, passes("rowwise"))
    for memory in ("none", "full", "selective"):
        step, again = captured(model, next_token_loss, batch, passes("rowwise", memory=memory))
        assert all(map(torch.equal, kept, again))
    assert count(step, ours.scaled_product.default) == 21  # which selective keeps


def test_microbatches_are_cast_apart():
    """A mean over two microbatches of eager layers."""
    model, batch = llama(torch.bfloat16), tokens()
    _, found = captured(model, next_token_loss, batch, passes("rowwise"), accumulate=2)
    eager = swap(copy.deepcopy(model), "rowwise", ["head"])
    for i in range(2):
        (next_token_loss(eager, {key: value.chunk(2)[i] for key, value in batch.items()}) / 2).backward()
    by_name = dict(eager.named_parameters())
    for (name, _), mine in zip(model.named_parameters(), found[1:], strict=True):
        assert torch.equal(mine, by_name[name].grad), name


def test_verify_shows_how_far_it_is_from_bf16():
    model = copy.deepcopy(llama(torch.bfloat16))
    step = stepgraph.capture(model, next_token_loss, tokens(), passes=passes("rowwise"))
    report = step.verify(tokens())
    assert not report.bitwise and report.close and 0 < report.largest.relative < 0.5


def test_a_matrix_that_is_written_is_cast_again(tools):
    def function(x, w, v):
        y = x @ w.t()
        x.mul_(2)
        return y, x @ v.t(), w, v

    inputs = [torch.randn(32, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.randn(48, 16).bfloat16()]
    step = tools.by_hand(function, *inputs)
    step.inputs[0] = InputSpec(BatchLeaf(0))
    (report,) = run_passes(step, [get("fp8_matmul", recipe="rowwise", unprofitable=True)])
    assert report.changed == 2
    assert len(step.graph.find_nodes(op="call_function", target=ours.cast_scaled_rows.default)) == 4
    y, z, *_ = step.module(*(t.clone() for t in inputs))
    x, w, v = inputs
    for found, a, b in ((y, x, w), (z, 2 * x, v)):
        assert torch.equal(found, product(quantized(a, "rowwise"), quantized(b, "rowwise")))


def test_options():
    assert "fp8_matmul" not in [p.name for p in configured()]
    found = {p.name: p for p in configured(fp8="rowwise", fp8_skip=("layers.0.*",))}["fp8_matmul"]
    assert (found.options.recipe, found.options.skip, found.options.unprofitable) == ("rowwise", ("layers.0.*",), False)
    for options, message in (
        ({"passes": "exact", "fp8": "rowwise"}, "fp8=rowwise with passes=exact"),
        ({"fp8_skip": ("a",)}, "fp8_skip needs fp8, and fp8=off"),
        ({"fp8": "row"}, "unknown fp8 'row': choose one of off, rowwise"),
        ({"fp8": True}, "unknown fp8 True: choose one of off, rowwise"),
        ({"fp8": "rowwise", "fp8_skip": "head"}, r"fp8_skip='head' is one word; allowed is a tuple of them: "),
        ({"disable_pass": "inductor"}, r"allowed is a tuple of them: disable_pass=\('inductor',\)"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(StepOptions(**options))
    with pytest.raises(ValueError, match="unknown fp8 recipe 'columnwise'"):
        get("fp8_matmul", recipe="columnwise")
