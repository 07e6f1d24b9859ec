"""FlexAttention in the place of `scaled_dot_product_attention`: what it visits, what it computes, what it refuses.

On a CPU its operators run as dense attention, which evaluates the mask graphs and not the blocks: those are tested
against the masks that they stand for.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph.costs.flops import flops
from stepgraph.inductor.regional import Piece, Region, compile_pieces
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions, chosen, get, run_passes
from stepgraph.passes.attention.flex import BLOCK, block_kinds, block_tensors, kinds_of, visible_pairs, visited
from stepgraph.passes.attention.mask import Band
from tests.passes.attention import test_attention_windows as windows

higher_order = torch.ops.higher_order
HOPPER = (9, 0)
BF16 = torch.bfloat16
CAUSAL, ALL = Band(None, 0), Band(None, None)


def simulated(backend="flex", **options):
    """The pass on a CPU's graph."""
    options = {"simulated": True, "capability": HOPPER} | options
    return replace(
        get("attention", backend=backend, **options), needs_cuda=False, for_target=lambda options, target: options
    )


def flex_nodes(step):
    return [n for n in step.nodes() if n.target in (higher_order.flex_attention, higher_order.flex_attention_backward)]


# The blocks that it visits


def shown(queries, keys, band):
    d = torch.arange(queries)[:, None] - torch.arange(keys)
    return (d <= (queries if band.left is None else band.left)) & (-d <= (keys if band.right is None else band.right))


sides = st.one_of(st.none(), st.integers(0, 5), st.integers(120, 140), st.integers(0, 700))
lengths = st.one_of(st.integers(1, 600), st.sampled_from([1, 127, 128, 129, 256, 384, 512]))


@settings(deadline=None, max_examples=60)
@given(queries=lengths, keys=lengths, left=sides, right=sides)
def test_blocks_of_a_band_are_those_of_its_mask(queries, keys, left, right):
    band = Band(left, right)
    mask = shown(queries, keys, band)
    cut, whole = block_kinds(band, queries, keys)
    expected = kinds_of(mask[None, None])
    assert torch.equal(cut, expected[0][0, 0]) and torch.equal(whole, expected[1][0, 0])
    for i in range(cut.shape[0]):
        for j in range(cut.shape[1]):
            block = mask[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            inside = block.shape == (BLOCK, BLOCK)
            assert whole[i, j] == (inside and block.all()) and (cut[i, j] | whole[i, j]) == block.any()
    if not band.is_causal:
        assert visible_pairs(band, queries, keys) == mask.sum()
    assert visited(band, queries, keys) == pytest.approx((cut | whole).float().mean().item())


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_tensors_name_the_blocks_from_both_sides(batch, rows, columns, seed):
    kind = torch.randint(3, (batch, 1, rows, columns), generator=torch.Generator().manual_seed(seed))
    tensors = block_tensors(kind == 1, kind == 2)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in tensors)
    pairs = zip(tensors[::2], tensors[1::2], (kind == 1, kind == 2, kind.mT == 1, kind.mT == 2), strict=True)
    for counts, order, right in pairs:
        found = torch.zeros_like(right)
        for b in range(batch):
            for row in range(right.shape[2]):
                found[b, 0, row, order[b, 0, row, : counts[b, 0, row]].long()] = True
        assert torch.equal(found, right)


# What it computes


class Attend(nn.Module):
    """Attention whose queries, keys and values are parameters."""

    def __init__(self, shape, make_mask=None, causal=False, scale=None, dtype=torch.float32, layout="h"):
        super().__init__()
        B, H, H_kv, T, S, D, D_v = shape
        self.make_mask, self.causal, self.scale, self.layout = make_mask, causal, scale, layout
        for name, heads, length, width in (("q", H, T, D), ("k", H_kv, S, D), ("v", H_kv, S, D_v)):
            size = (B, heads, length, width) if layout == "h" else (B, length, heads, width)
            setattr(self, name, nn.Parameter(torch.randn(size, dtype=dtype)))

    def forward(self, given=None):
        q, k, v = (x if self.layout == "h" else x.transpose(1, 2) for x in (self.q, self.k, self.v))
        mask = self.make_mask(q, k, given) if self.make_mask else None
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, scale=self.scale, enable_gqa=grouped
        )


def weighted(model, batch):
    return (model(batch["given"]) * batch["dy"]).sum()


def exact(model, batch):
    """The gradients in fp64, by the mathematics."""
    double = Attend.__new__(Attend)
    nn.Module.__init__(double)
    double.make_mask, double.causal, double.scale, double.layout = (
        model.make_mask, model.causal, model.scale, model.layout
    )  # fmt: skip
    for name in "qkv":
        setattr(double, name, nn.Parameter(getattr(model, name).detach().double()))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = (double(batch["given"]) * batch["dy"].double()).sum()
    loss.backward()
    return loss.detach(), [p.grad for p in double.parameters()]


def check(model, given=None, tolerance=1e-4, passes=(), **options):
    """The step with FlexAttention gives the loss and the gradients of fp64; the step."""
    out = model(given)
    batch = {"given": given, "dy": torch.randn_like(out)}
    step = stepgraph.capture(model, weighted, batch, passes=[simulated(**options), *passes])
    report = step.report[0]
    assert report.changed == 1 and "1 by flex" in report.summary, (report.summary, report.notes)
    right = exact(model, batch)
    loss = step(batch)
    torch.testing.assert_close(loss.double(), right[0], rtol=tolerance, atol=tolerance * out.numel() ** 0.5)
    for p, grad in zip(model.parameters(), right[1], strict=True):
        torch.testing.assert_close(
            p.grad.double(), grad, rtol=tolerance, atol=tolerance * max(1.0, grad.abs().max().item())
        )
    return step


def window(left, right):
    def make(q, k, given):
        d = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        return (d <= left) & (-d <= right)

    return make


@pytest.mark.parametrize("number", range(14))
def test_as_in_float64(number):
    """Seeded shapes: shared keys, odd lengths, every width that is allowed, other lengths of keys, both layouts."""
    pick = random.Random(number)
    H = pick.choice([1, 2, 4, 6])
    H_kv = pick.choice([h for h in (1, 2, 3, 6) if H % h == 0])
    T, D = pick.choice([1, 3, 17, 64, 129, 200]), pick.choice([16, 24, 40, 64, 80, 96, 112, 128])
    kind = pick.choice(["none", "causal", "window", "other keys"])
    S = pick.choice([5, 130]) if kind == "other keys" else T
    shape = (pick.choice([1, 2]), H, H_kv, T, S, D, D)
    make = window(pick.randrange(T), pick.randrange(T)) if kind == "window" else None
    scale = pick.choice([None, 0.3, 1.0])
    torch.manual_seed(number)
    check(Attend(shape, make, kind == "causal", scale, layout=pick.choice("ht")))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_in_half_precision(dtype):
    torch.manual_seed(0)
    check(Attend((2, 4, 2, 72, 72, 64, 64), causal=True, dtype=dtype, layout="t"), tolerance=0.03)


def documents(q, k, given):
    """``given``: (B, T), which document each token is of."""
    here = torch.arange(q.shape[2])
    same = given[:, :, None] == given[:, None, :]
    return (same & (here[:, None] >= here)).unsqueeze(1)


def test_documents_of_every_batch():
    """The graph finds the blocks of each batch's documents; all heads share them."""
    torch.manual_seed(0)
    ids = torch.tensor([[0] * 100 + [1] * 60, [0] * 7 + [1] * 150 + [2] * 3])
    step = check(Attend((2, 4, 2, 160, 160, 16, 16), documents), ids)
    forward, backward = flex_nodes(step.graph)
    assert forward.args[4][-1] is backward.args[9][-1] and forward.args[8] == backward.args[11 + 2]
    (table,) = forward.args[8]
    assert table.meta["val"].shape == (2, 160, 160) and table.meta["val"].dtype == torch.bool
    assert not any(n.target is torch.ops.aten.where.self for n in step.graph.nodes())  # no mask of numbers is left
    assert forward.args[4][3].meta["val"].shape == (2, 1, 2, 2)
    assert flops(forward) == 4 * 2 * 4 * 16 * 160 * 160 // 2  # at most causal


def test_queries_that_see_no_key():
    """Hidden by -inf they give zeros, as torch's mathematics does; hidden by a number, the mean that it makes."""
    torch.manual_seed(0)
    ids = torch.arange(40).remainder(3)[None]

    def holes(hidden):
        def make(q, k, given):
            visible = (given[:, :, None] > 0) & (given[:, :, None] >= given[:, None, :])
            return torch.where(visible, 0.0, hidden).to(q.dtype).unsqueeze(1)

        return make

    check(Attend((1, 2, 2, 40, 40, 16, 16), holes(-math.inf)), ids)
    check(Attend((1, 2, 2, 40, 40, 16, 16), holes(-65504.0)), ids, tolerance=0.02)  # fp32 next to 65,504


def test_padded_keys():
    """One row of booleans for all queries."""
    torch.manual_seed(0)

    def make(q, k, given):
        return given[:, None, None, :]

    check(Attend((2, 4, 2, 140, 140, 16, 16), make), torch.arange(140) < torch.tensor([[100], [139]]))


def test_numbers_that_torch_aligns():
    """As for its memory-efficient kernel, whose masks begin at multiples of 16 bytes."""

    def make(q, k, given):
        numbers = torch.where(documents(q, k, given), 0.0, -math.inf).to(q.dtype)
        return F.pad(numbers, (0, 6))[..., :42].expand(q.shape[0], q.shape[1], 42, 42)

    torch.manual_seed(0)
    step = check(Attend((2, 2, 2, 42, 42, 16, 16), make), torch.arange(42).div(20).long().expand(2, 42))
    (table,) = flex_nodes(step.graph)[0].args[8]
    assert table.meta["val"].shape == (2, 42, 42)


def test_all_layers_share_the_blocks():
    step = windows.attention_graph(windows.sliding)
    run_passes(step, [simulated()])
    nodes = flex_nodes(step)
    assert [n.target for n in nodes] == [higher_order.flex_attention, higher_order.flex_attention_backward] * 2
    assert len({id(n.args[4 if n.target is higher_order.flex_attention else 9][3]) for n in nodes}) == 1
    assert [flops(n) // 4 for n in nodes[:1]] == [2 * 4 * 64 * (48 * 8 - 28)]
    assert not any("where" in str(n.target) or "arange" in str(n.target) for n in step.graph.nodes)


def test_layers_share_the_blocks_of_documents():
    step = windows.attention_graph(windows.padded)
    run_passes(step, [simulated()])
    assert len({n.args[4][3] for n in flex_nodes(step) if n.target is higher_order.flex_attention}) == 1


@pytest.mark.long
@pytest.mark.parametrize("make_mask", [documents, window(130, 3)])
def test_inductor_visits_the_blocks(make_mask):
    """Its template for a CPU, which has no backward, reads the blocks and evaluates the mask graph inside them."""
    torch.manual_seed(0)
    ids = torch.tensor([[0] * 100 + [1] * 160, [0] * 7 + [1] * 150 + [2] * 103])
    model = Attend((2, 2, 1, 260, 260, 32, 32), make_mask)
    step = check(model, ids)
    module = step.graph.module
    forward, _ = flex_nodes(step.graph)
    forward.update_arg(6, forward.args[6] | {"OUTPUT_LOGSUMEXP": False})  # which the template does not give
    out = next(user for user in forward.users if user.args[1] == 0)
    module.graph.output_node().args = ([out],)
    module.graph.eliminate_dead_code()
    compiled = compile_pieces(module, [Piece(Region("attention", "attention"), [forward, out])], {}).module
    inputs = [spec.tensor if spec.tensor is not None else ids for spec in step.graph.inputs]
    torch.testing.assert_close(compiled(*inputs)[0], model(ids))


# What stays, and what is refused


def scrambled(q, padding):
    bias = torch.randn(q.shape[2], q.shape[2])
    return bias > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.1}, "it has dropout"),
        ({"causal": True}, "causal and has a mask"),
        ({"hidden": -1e30}, "makes all keys equal where it hides all"),
        ({"channels": 8, "op": "efficient"}, "16 to 256 channels, not of 8"),
        ({"channels": 320, "op": "efficient"}, "16 to 256 channels, not of 320"),
        ({"dtype": torch.float64, "op": "efficient"}, "computes in float64"),
    ],
)
def test_refused_in_one_line(options, reason):
    step = windows.attention_graph(windows.padded, **options)
    with pytest.raises(ValueError, match="attention=flex does not support attn") as error:
        run_passes(step, [simulated()])
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_mask_of_other_numbers_is_refused():
    def biased(q, k, given):
        return given.to(q.dtype)

    model, given = Attend((1, 2, 2, 12, 12, 16, 16), biased), torch.randn(1, 1, 12, 12)
    batch = {"given": given, "dy": torch.randn(1, 2, 12, 16)}
    with pytest.raises(
        ValueError, match=r"attention=flex does not support .* depends on .*does not make it of booleans"
    ):
        stepgraph.capture(model, weighted, batch, passes=[simulated()])


def test_without_inductor():
    with pytest.raises(ValueError, match=r"attention=flex with inductor=off: .* Inductor's; allowed then: .*regional"):
        chosen(StepOptions(attention="flex", inductor="off"))
    for inductor, disabled in (("full", "inductor"), ("regional", "tag_regions")):
        with pytest.raises(ValueError, match=f"attention=flex with disable_pass={disabled}"):
            chosen(StepOptions(attention="flex", inductor=inductor, disable_pass=(disabled,)))
    found = {p.name: p for p in chosen(StepOptions(attention="flex", inductor="regional"))}
    assert found["attention"].options.compiled and "attention_windows" not in found
    off = {p.name: p for p in chosen(StepOptions(inductor="off"))}
    assert not off["attention"].options.compiled and "attention_windows" in off
    step = windows.attention_graph(windows.sliding)
    with pytest.raises(ValueError, match="which does not compile this step; allowed for all of this step: auto, eager"):
        run_passes(step, [simulated(compiled=False)])


# What `auto` names it for


def long_masked(make_mask, dtype=BF16, T=1024, width=64):
    model = Attend((1, 2, 2, T, T, width, width), make_mask, dtype=dtype)
    given = torch.zeros(1, T, dtype=torch.long)
    return model, {"given": given, "dy": torch.randn(1, 2, T, width, dtype=dtype)}


@pytest.mark.parametrize(
    ("make_mask", "settings", "named"),
    [
        (documents, {}, True),
        (window(100, 0), {}, True),  # which `attention_windows` takes where FlashAttention 2 can
        (documents, {"T": 512}, False),
        (documents, {"dtype": torch.float32}, False),
        (window(1000, 1000), {}, False),
    ],
)
def test_auto_says_what_a_mask_hides(make_mask, settings, named):
    model, batch = long_masked(make_mask, **settings)
    step = stepgraph.capture(model, weighted, batch, passes=[simulated("auto")])
    report = step.report[0]
    assert "1 by cpu" in report.summary
    assert ("attention=flex would visit at most" in "".join(report.notes)) == named, report.notes
    if named:
        for options in ({"compiled": False}, {"lengths_vary": True}):
            step = stepgraph.capture(model, weighted, batch, passes=[simulated("auto", **options)])
            assert "attention=flex" not in "".join(step.report[0].notes)


# Whole steps

TINY = Llama3Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, max_seq_len=16)


def tiny_batch(documents=False):
    tokens = torch.randint(64, (2, 2, 16))
    batch = {"tokens": tokens[0], "targets": tokens[1]}
    positions = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, 16).contiguous()
    return batch | {"positions": positions} if documents else batch


@pytest.mark.parametrize("memory", ["none", "selective", "full"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_step_recomputed_and_verified(memory, documents):
    torch.manual_seed(0)
    model = Llama3(TINY)
    batch = tiny_batch(documents)
    passes = [simulated(), get("recompute", policy=memory)]
    step = stepgraph.capture(model, next_token_loss, batch, torch.optim.AdamW(model.parameters()), passes=passes)
    found = [n.target for n in flex_nodes(step.graph)]
    assert found.count(higher_order.flex_attention) == (4 if memory == "full" else 2)
    assert found.count(higher_order.flex_attention_backward) == 2
    report = step.verify(batch)
    assert report.close, str(report)
    assert torch.isfinite(step(batch))


@pytest.mark.parametrize("documents", [False, True])
def test_a_saved_step_keeps_its_blocks(documents, tmp_path):
    """The second start loads the graph, with the constants of the first."""

    def start():
        torch.manual_seed(0)
        model = Llama3(TINY)
        batch = tiny_batch(documents)
        step = stepgraph.capture(model, next_token_loss, batch, passes=[simulated()], saved=tmp_path)
        return step, step(batch), [p.grad for p in model.parameters()]

    first, loss, grads = start()
    second, again, same = start()
    assert first.saved.kept and second.saved.loaded
    assert second.program.text() == first.program.text()
    assert [flops(n) for n in flex_nodes(second.graph)] == [flops(n) for n in flex_nodes(first.graph)]
    assert torch.equal(loss, again) and all(map(torch.equal, grads, same))
