"""The golf model against its formulas, written out in float64."""

import math
from dataclasses import replace

import pytest
import torch

from stepgraph import models
from stepgraph.models import Golf, GolfConfig, num_params

SMALL = GolfConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=53)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def reference(weights: dict[str, torch.Tensor], config: GolfConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Logits from the formulas, head by head, with an explicit softmax over the positions seen."""
    dim = config.dim // config.n_heads
    shared = config.n_heads // config.n_kv_heads
    seen = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
    x = norm(weights["embed.weight"][tokens])
    for i in range(config.n_layers):
        w = {name.removeprefix(f"layers.{i}."): t for name, t in weights.items() if name.startswith(f"layers.{i}.")}
        h = norm(x)
        heads = []
        for j in range(config.n_heads):
            mine = slice(j * dim, (j + 1) * dim)
            group = slice(j // shared * dim, (j // shared + 1) * dim)
            q = norm(h @ w["attn.q_proj.weight"][mine].T)
            k = norm(h @ w["attn.k_proj.weight"][group].T)
            v = h @ w["attn.v_proj.weight"][group].T
            scores = (q @ k.mT / math.sqrt(dim)).masked_fill(~seen, -math.inf)
            heads.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v)
        x = x + w.get("attn_scale", 1.0) * (torch.cat(heads, -1) @ w["attn.o_proj.weight"].T)
        h = norm(x) @ w["mlp.up_proj.weight"].T
        h = torch.where(h > 0, h, config.negative_slope * h) ** 2
        x = x + w.get("mlp_scale", 1.0) * (h @ w["mlp.down_proj.weight"].T)
    return norm(x) @ weights["head.weight"].T


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, n_kv_heads=4), replace(SMALL, residual_scales=True)],
    ids=["gqa", "mha", "residual_scales"],
)
def test_logits_and_gradients_match_the_formulas(config):
    torch.manual_seed(0)
    model = Golf(config).double()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.3)
    tokens = torch.randint(0, config.vocab_size, (2, 19))
    weights = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    logits, expected = model(tokens), reference(weights, config, tokens)
    # float64 on both sides: only the order of sums of up to 48 terms differs.
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for name, param in model.named_parameters():
        scale = weights[name].grad.abs().max().item()
        torch.testing.assert_close(param.grad, weights[name].grad, rtol=1e-10, atol=1e-12 * scale, msg=name)


def test_residual_scales_start_as_the_plain_model():
    plain, scaled = (Golf(replace(SMALL, residual_scales=on)) for on in (False, True))
    for model in (plain, scaled):
        model.init_weights(5)
    tokens = torch.randint(0, SMALL.vocab_size, (2, 19))
    assert torch.equal(plain(tokens), scaled(tokens))
    assert num_params(scaled) - num_params(plain) == 2 * SMALL.n_layers * SMALL.dim


def test_settings_and_size_are_the_issue_s():
    config = models.golf()
    with torch.device("meta"):
        model = Golf(config)
    # 11 blocks (q and o, k and v, up and down), the embedding and the head; norms have no weights.
    expected = 11 * (2 * 512 * 512 + 2 * 512 * 256 + 2 * 512 * 2048) + 2 * 4096 * 512
    assert num_params(model) == config.num_params() == expected
    with torch.device("meta"):
        scaled = replace(config, residual_scales=True)
        assert num_params(Golf(scaled)) == scaled.num_params() == expected + 11 * 2 * 512


def test_meta_init_gives_the_same_weights_as_direct_init():
    config = replace(SMALL, residual_scales=True)
    direct = Golf(config)
    with torch.device("meta"):
        late = Golf(config)
    late.to_empty(device="cpu")
    for model in (direct, late):
        model.init_weights(7)
    for (name, a), b in zip(direct.named_parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 5}, "n_heads=5 does not divide dim=32; try n_heads=4 or n_heads=8"),
        ({"n_kv_heads": 8}, "n_kv_heads=8 does not divide n_heads=4; try n_kv_heads=4"),
        ({"vocab_size": -1}, "vocab_size=-1 is not positive; use a value above 0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(change, message):
    with pytest.raises(ValueError) as refused:
        replace(SMALL, **change)
    assert str(refused.value) == message
