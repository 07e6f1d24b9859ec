"""A packed row under a document mask against its documents one by one, for every family."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph
from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, next_token_loss
from stepgraph.models.decoder import LayerCache
from stepgraph.models.documents import document_mask
from tests.models.moe_models import DEEPSEEK, QWEN, our_model

T = 20
SIZES = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 96}
LLAMA = Llama3Config(dim=32, max_seq_len=64, **SIZES)
MODELS = {
    "llama3": lambda: Llama3(LLAMA),
    "golf": lambda: Golf(GolfConfig(dim=32, **SIZES)),
    "deepseek-v3": lambda: our_model(DEEPSEEK),
    "qwen3-moe": lambda: our_model(QWEN),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


def lengths_of(cuts):
    ends = [*sorted(cuts), T]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


rows = st.lists(st.sets(st.integers(1, T - 1), max_size=5).map(lengths_of), min_size=1, max_size=3)


def positions_of(rows):
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def gradients(model, losses):
    model.zero_grad()
    sum(losses).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@settings(max_examples=6, deadline=None, derandomize=True)
@given(rows)
def test_a_packed_row_is_its_documents_one_by_one(model, rows):
    """fp32: sums over masked keys have the same terms in another order, some 1e-7 of each value."""
    tokens = torch.randint(96, (len(rows), T), generator=torch.Generator().manual_seed(len(rows)))
    slopes = torch.randn(len(rows), T, 96, generator=torch.Generator().manual_seed(1))
    packed = model(tokens, positions=positions_of(rows))
    mine = gradients(model, [(packed * slopes).sum()])
    alone = [[model(one[None])[0] for one in row.split(n)] for row, n in zip(tokens, rows, strict=True)]
    alone = torch.stack([torch.cat(documents) for documents in alone])
    theirs = gradients(model, [(alone * slopes).sum()])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-3, msg=name)


def test_a_captured_step_takes_other_documents_than_it_was_captured_with(model):
    tokens = torch.randint(96, (2, T))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "positions": positions_of([[T], [T]])}
    step = stepgraph.capture(model, next_token_loss, batch, passes="exact")
    batch["positions"] = positions_of([[3, 1, 16], [T - 1, 1]])
    assert step.verify(batch).bitwise


def test_the_mask_is_made_once_for_all_layers_and_not_without_positions():
    tokens = torch.randint(96, (2, T))
    batch = {"tokens": tokens, "targets": tokens, "positions": positions_of([[T], [T]])}

    def squares(batch):
        step = stepgraph.capture(Llama3(LLAMA), next_token_loss, batch, passes=[])
        found = [n for n in step.graph.nodes("forward") if getattr(n.meta["val"], "shape", ())[-2:] == (T, T)]
        assert not [n for n in found if step.graph.block_of(n)]
        return found

    (read,) = [n for n in squares(batch) if len(n.users) > 1]  # by both layers, forward and backward
    assert read.meta["val"].shape == (2, 1, T, T)
    del batch["positions"]
    assert not squares(batch)


def test_the_mask_has_the_dtype_that_attention_computes_in():
    positions = positions_of([[2, 3]])
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    mask = document_mask(positions, torch.float32)
    assert mask.dtype == torch.float32 and torch.equal(mask[0, 0].exp(), torch.tensor(seen, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert document_mask(positions, torch.float32).dtype == torch.bfloat16


def test_what_positions_cannot_be_is_refused():
    llama, tokens = Llama3(LLAMA), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"positions are \(1, 3\) and tokens \(1, 4\); use one for each token"):
        llama(tokens, positions=tokens[:, :3])
    with pytest.raises(ValueError, match="a cache holds one text"):
        llama(tokens, [LayerCache(8), LayerCache(8)], tokens)
