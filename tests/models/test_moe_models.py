"""DeepSeek-V3 and Qwen3-MoE against Hugging Face's, which we did not write, and their own promises."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

import stepgraph
from stepgraph import models
from stepgraph.models import MoEConfig, YarnScaling, flops_per_token, num_params
from stepgraph.models.deepseek_v3 import LatentAttention
from stepgraph.models.moe import Router
from tests.models.moe_models import DEEPSEEK, KINDS, QWEN, SIGMOID, hf_model, hf_named, our_model, tokens_for


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_match_hugging_face(kind, tmp_path):
    config = KINDS[kind]
    ours = our_model(config)
    hf = hf_model(ours, tmp_path)
    tokens = tokens_for(config)
    logits, expected = ours(tokens), hf(tokens).logits
    # Same arithmetic in another order (fused attention, sums over experts): sums of up to 80 fp32 products differ in
    # their last bits, about sqrt(80) * 6e-8 of the largest term, through 3 layers.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    logits.square().mean().backward()
    expected.square().mean().backward()
    theirs = dict(hf.named_parameters())
    grads = hf_named(ours, {name: param.grad for name, param in ours.named_parameters()})
    assert grads.keys() == theirs.keys()
    for name, ours_grad in grads.items():
        grad = theirs[name].grad
        torch.testing.assert_close(ours_grad, grad, rtol=1e-5, atol=3e-5 * grad.abs().max().item(), msg=name)


@pytest.mark.parametrize("config", [DEEPSEEK, QWEN], ids=["deepseek", "qwen"])
def test_autocast_is_as_near_to_fp32_as_hugging_faces(config, tmp_path):
    ours = our_model(config)
    hf, tokens = hf_model(ours, tmp_path), tokens_for(config)
    with torch.no_grad():
        exact = hf(tokens).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert ours(tokens).dtype == torch.bfloat16
            ours_error = (ours(tokens).float() - exact).abs().mean()
            hf_error = (hf(tokens).logits.float() - exact).abs().mean()
    # Both round at the same places, but for weights of experts, which ours keep in fp32.
    assert 0 < ours_error < 1.5 * hf_error


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_router_chooses_as_hugging_faces(data):
    groups = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(2, 4))
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * size))
    normalize, scale = data.draw(st.booleans()), data.draw(st.floats(0.25, 4.0))
    config = MoEConfig(
        n_experts=groups * size,
        top_k=top_k,
        ffn_dim=8,
        scoring="sigmoid",
        normalize=normalize,
        scale=scale,
        n_groups=groups,
        top_groups=top_groups,
        selection_bias=True,
    )
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=16,
            n_routed_experts=groups * size,
            num_experts_per_tok=top_k,
            n_group=groups,
            topk_group=top_groups,
            norm_topk_prob=normalize,
            routed_scaling_factor=scale,
        )
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    ours = Router(16, config)
    with torch.no_grad():
        ours.weight.normal_(generator=generator)
        ours.expert_bias.normal_(generator=generator)
        theirs.weight.copy_(ours.weight)
        theirs.e_score_correction_bias.copy_(ours.expert_bias)
    x = torch.randn(13, 16, generator=generator)
    chosen, weights = ours(x)
    _, their_weights, their_chosen = theirs(x)
    order, their_order = chosen.argsort(dim=1), their_chosen.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), their_chosen.gather(1, their_order))
    assert torch.allclose(weights.gather(1, order), their_weights.gather(1, their_order), rtol=1e-6, atol=0)


def test_scores_are_fp32_whatever_the_input():
    router = Router(16, replace(SIGMOID, n_groups=1, top_groups=1)).bfloat16()
    with torch.no_grad():
        router.weight.normal_()
    x = torch.randn(64, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chosen, weights = router(x)
    scores = torch.sigmoid(x.float() @ router.weight.float().T)
    assert weights.dtype == torch.float32
    expected = scores.gather(1, chosen)
    assert torch.allclose(weights, 2.5 * expected / expected.sum(1, keepdim=True), rtol=1e-6)


def test_load_counts_tokens_once_in_backward_alone():
    tokens = tokens_for(DEEPSEEK)
    counted = {}
    for kind in ("plain", "reentrant", "not reentrant"):
        model = our_model(DEEPSEEK)
        if kind != "plain":
            for block in model.layers:
                block.forward = _checkpointed(block.forward, kind == "reentrant")
        with torch.no_grad():
            model(tokens)  # an evaluation
        model(tokens).square().mean().backward()
        counted[kind] = torch.stack([router.tokens_per_expert for router in model.routers])
    assert (counted["plain"].sum(dim=1) == tokens.numel() * SIGMOID.top_k).all()
    assert torch.equal(counted["plain"], counted["reentrant"])
    assert torch.equal(counted["plain"], counted["not reentrant"])


@pytest.mark.parametrize("config", [DEEPSEEK, QWEN], ids=["deepseek", "qwen"])
def test_the_balance_loss_is_that_of_the_report(config):
    """Equations 17 to 20 sequence by sequence, in training alone, and once where forward runs again for backward."""
    moe = replace(config.moe, balance_loss=0.5)
    plain, model = our_model(config), our_model(replace(config, moe=moe))
    tokens, seen = tokens_for(config), []
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    for router in plain.routers:
        router.register_forward_pre_hook(lambda router, given: seen.append((router.weight, given[0])))
    expected = models.next_token_loss(plain, batch)
    for weight, x in seen:
        logits = x.unflatten(0, (3, -1)) @ weight.T
        for scores in logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(dim=-1):
            counts = scores.topk(moe.top_k)[1].flatten().bincount(minlength=moe.n_experts)
            share = counts * moe.n_experts / counts.sum()
            expected = expected + 0.5 / 3 * share @ (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)
    loss = models.next_token_loss(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    with torch.no_grad():
        assert torch.equal(models.next_token_loss(model, batch), models.next_token_loss(plain, batch))
    for block in model.layers:
        block.forward = _checkpointed(block.forward, False)
    again = models.next_token_loss(model, batch)
    assert torch.equal(again, loss)
    for found, wanted in zip(
        *(
            torch.autograd.grad(value, m.layers[-1].mlp.router.weight)
            for value, m in ((again, model), (expected, plain))
        ),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


def _checkpointed(forward, reentrant):
    return lambda *args: checkpoint(forward, *args, use_reentrant=reentrant)


def test_biases_move_against_the_load():
    model = our_model(DEEPSEEK)
    before = [router.expert_bias.clone() for router in model.routers]
    load = torch.tensor([[5, 3, 0, 4, 4, 4, 4, 8], [4, 4, 4, 4, 4, 4, 4, 4]])  # mean 4
    for router, counts in zip(model.routers, load, strict=True):
        router.tokens_per_expert.copy_(counts)
    metrics = stepgraph.end_of_step(model)
    moved = [router.expert_bias - old for router, old in zip(model.routers, before, strict=True)]
    assert torch.allclose(moved[0], 0.1 * torch.tensor([-1.0, 1, 1, 0, 0, 0, 0, -1]), atol=1e-6)
    assert not moved[1].any()
    assert metrics["expert_load"].tolist() == [2.0, 1.0]
    assert not any(router.tokens_per_expert.any() for router in model.routers)


@pytest.mark.parametrize(
    ("make", "total", "active"),
    [
        # Their model cards: 671B and 37B; 15.7B and 2.4B without the two tables; 30.5B and 3.3B.
        (models.deepseek_v3_671b, 671_026_404_352, 37.6e9),
        (models.deepseek_v3_16b, 15_706_484_224, 2.66e9),
        (models.qwen3_30b_a3b, 30_532_122_624, 3.35e9),
        (models.deepseek_v3_debug, 8_895_360, 3.14e6),
    ],
)
def test_parameter_counts(make, total, active):
    config = make()
    with torch.device("meta"):
        model = models.family_of(config).model(config)
    assert num_params(model) == config.num_params() == total
    assert config.num_params(active=True) == pytest.approx(active, rel=5e-3)
    tables = config.num_params() - config.num_params(lookup_table=False)
    assert tables == config.vocab_size * config.dim


@pytest.mark.parametrize("kind", ["deepseek", "tied", "no-query-compression", "qwen-not-normalized-tied"])
def test_flops_are_those_that_torch_counts(kind, monkeypatch):
    """Forward and backward as torch's own counter sees them, which knows attention's two head sizes."""

    def attend_on_gpus(self, q, k, v, causal, mask):  # where values are not padded to the width of keys
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale)

    monkeypatch.setattr(LatentAttention, "_attend", attend_on_gpus)
    config = KINDS[kind]
    model, tokens = our_model(config), tokens_for(config, seq_len=32)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, math:
        model(tokens).sum().backward()
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)  # in N, and no product
    expected = (flops_per_token(config, 32) - 6 * norms) * tokens.numel()
    assert counter.get_total_flops() == expected


def test_flops_of_the_16b_cut_to_10_layers_are_torchtitans():
    """torchtitan 0.2.2 counts 6 (dense + active experts - embedding) + 6 layers heads (192 + 128) length."""
    config = replace(models.deepseek_v3_16b(), n_layers=10)
    assert config.num_params() == pytest.approx(5.76e9, rel=1e-3)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048
    experts = 9 * (64 * 2048 + (6 + 2) * 3 * 2048 * 1408)
    other = 10 * (attention + 2 * 2048) + 3 * 2048 * 10_944 + 2048 + 102_400 * 2048
    assert flops_per_token(config, 4096) == 6 * (experts + other) + 6 * 10 * 16 * (192 + 128) * 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_groups": 3}, "n_groups=3 does not divide n_experts=8; try n_groups=1"),
        ({"top_groups": 5}, "top_groups=5 is above n_groups=4; try 4"),
        ({"top_k": 5}, "top_k=5 is above the 4 experts of top_groups=2 groups; try top_k=4"),
        ({"n_groups": 8, "top_groups": 4}, "n_groups=8 leaves one expert a group"),
        ({"scoring": "tanh"}, "unknown scoring 'tanh'"),
        ({"balance_rate": -0.1}, "balance_rate=-0.1 is negative"),
        ({"n_shared": -1}, "n_shared=-1 is negative"),
    ],
)
def test_experts_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SIGMOID, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_dense_layers": 3}, "n_dense_layers=3 must be at least 0 and below n_layers=3"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd, RoPE rotates pairs; try 8"),
        ({"q_lora_rank": 0}, "q_lora_rank=0 is not positive"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DEEPSEEK, **change)
    with pytest.raises(ValueError, match=r"beta_fast=1\.0 is not above beta_slow=1\.0"):
        YarnScaling(factor=4.0, beta_fast=1.0)
    with pytest.raises(ValueError, match="sequence length 65 is above max_seq_len=64"):
        our_model(QWEN)(torch.zeros(1, 65, dtype=torch.int64))


def test_a_meta_model_takes_weights_afterwards():
    with torch.device("meta"):
        model = models.DeepSeekV3(DEEPSEEK)
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    expected = models.DeepSeekV3(DEEPSEEK)
    expected.init_weights(seed=3)
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), b in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(a, b), name
