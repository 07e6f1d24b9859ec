"""Llama 3 against Hugging Face's, which we did not write, and its own promises."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from stepgraph import models
from stepgraph.models import Llama3, Llama3Config, RopeScaling, num_params
from stepgraph.models.llama3 import LLAMA3
from stepgraph.models.rope import rope_frequencies, rope_tables

SMALL = Llama3Config(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=97, max_seq_len=64, norm_eps=1e-5
)
# Original length 16, so that 40 positions hold frequencies that are kept, blended and divided.
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
VARIANTS = {
    "gqa": SMALL,
    "mha": replace(SMALL, n_kv_heads=4),
    "mqa": replace(SMALL, n_kv_heads=1),
    "tied": replace(SMALL, tie_embeddings=True),
    "scaled": replace(SMALL, rope_scaling=SCALING, rope_theta=10_000.0),
}


def hf_model(config: Llama3Config) -> LlamaForCausalLM:
    """Hugging Face's model of the same shape, with its plain-matmul attention and random weights, norms included."""
    scaling = config.rope_scaling
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    hf = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.ffn_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
        )
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in hf.parameters():
            param.normal_(1.0 if param.ndim == 1 else 0.0, 0.1, generator=generator)
    return hf


def pair(config: Llama3Config) -> tuple[Llama3, LlamaForCausalLM]:
    """Our model and Hugging Face's with the same weights."""
    ours, hf = Llama3(config), hf_model(config)
    theirs = dict(hf.named_parameters())
    with torch.no_grad():
        for name, param in ours.named_parameters():
            param.copy_(theirs.pop(LLAMA3.hugging_face.name(name)))
    assert not theirs, "every Hugging Face parameter has its place in ours"
    return ours, hf


def tokens_for(config: Llama3Config, seq_len: int = 40, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (3, seq_len), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_match_hugging_face(variant):
    config = VARIANTS[variant]
    ours, hf = pair(config)
    tokens = tokens_for(config)
    logits, expected = ours(tokens), hf(tokens).logits
    # Same arithmetic in another order (fused attention, no materialized rotation): sums of up to 96 fp32 products
    # differ in their last bits, about sqrt(96) * 6e-8 of the largest term, through 2 layers.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    logits.square().mean().backward()
    expected.square().mean().backward()
    theirs = dict(hf.named_parameters())
    for name, param in ours.named_parameters():
        grad = theirs[LLAMA3.hugging_face.name(name)].grad
        torch.testing.assert_close(param.grad, grad, rtol=1e-5, atol=2e-5 * grad.abs().max().item(), msg=name)


def test_bf16_is_as_near_to_fp32_as_hugging_face_in_bf16():
    ours, hf = pair(SMALL)
    tokens = tokens_for(SMALL)
    with torch.no_grad():
        exact = hf(tokens).logits
        ours_error = (ours.bfloat16()(tokens).float() - exact).abs().mean()
        hf_error = (hf.bfloat16()(tokens).logits.float() - exact).abs().mean()
    # Both round at the same places, but for the norm's weight (torch multiplies before rounding, Hugging Face after).
    assert 0 < ours_error < 1.25 * hf_error


def test_autocast_matches_hugging_face_under_autocast():
    ours, hf = pair(SMALL)
    tokens = tokens_for(SMALL)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits, expected = ours(tokens), hf(tokens).logits
    assert logits.dtype == expected.dtype == torch.bfloat16
    scale = expected.float().abs().max()
    # bf16 has 8 bits: a product of two rounded factors is off by up to 2 ** -7; the sums average it down.
    assert (logits.float() - expected.float()).abs().max() < 2**-6 * scale


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling(factor=8.0), RopeScaling(factor=32.0)], ids=["none", "8x", "32x"]
)
def test_rope_frequencies_match_hugging_face(scaling):
    config = replace(models.llama3_8b(), rope_scaling=scaling, n_layers=1, dim=128, n_heads=1, n_kv_heads=1, ffn_dim=1)
    config = replace(config, vocab_size=1)
    expected = hf_model(config).model.rotary_emb.inv_freq
    ours = rope_frequencies(config.head_dim, config.rope_theta, scaling)
    # One more rounding or one less in the blended band: 2 ulp of fp32.
    torch.testing.assert_close(ours, expected, rtol=2.5e-7, atol=0.0)


def test_rope_tables_match_hugging_face_bitwise_without_scaling():
    config = replace(SMALL, max_seq_len=512)
    rotary = hf_model(config).model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(512)[None])
    ours_cos, signed_sin = rope_tables(512, config.head_dim, config.rope_theta, None)
    half = config.head_dim // 2
    assert torch.equal(ours_cos[:, 0], cos[0])
    assert torch.equal(signed_sin[:, 0, half:], sin[0, :, half:])
    assert torch.equal(signed_sin[:, 0, :half], -sin[0, :, :half])


def test_a_token_never_sees_later_ones():
    model = Llama3(SMALL)
    tokens = tokens_for(SMALL)
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])


def test_forward_copies_nothing_but_the_rotation():
    class Calls(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    model = Llama3(SMALL)
    with Calls() as calls, torch.no_grad():
        model(tokens_for(SMALL))
    copies = [n for n in calls.names if n.split("::")[1].split(".")[0] in ("clone", "copy_", "_to_copy", "contiguous")]
    assert copies == []
    assert calls.names.count("aten::cat") == 2 * SMALL.n_layers, "one rearrangement per rotated tensor"


@pytest.mark.parametrize("tied", [False, True])
def test_meta_init_gives_the_same_weights_as_direct_init(tied):
    config = replace(SMALL, tie_embeddings=tied)
    direct = Llama3(config)
    with torch.device("meta"):
        late = Llama3(config)
    assert all(t.is_meta for t in [*late.parameters(), *late.buffers()])
    late.to_empty(device="cpu")
    for tensor in [*late.parameters(), *late.buffers()]:
        tensor.detach().fill_(torch.nan)
    for model in (direct, late):
        model.init_weights(7)
    tensors = dict([*late.named_parameters(), *late.named_buffers()])
    for name, tensor in [*direct.named_parameters(), *direct.named_buffers()]:
        assert torch.equal(tensor, tensors[name]), name
    assert torch.equal(direct(tokens_for(config)), late(tokens_for(config)))


def test_direct_construction_is_initialized_and_follows_the_seed():
    first, second = (torch.manual_seed(3) and Llama3(SMALL) for _ in range(2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    stds = {name: param.std().item() for name, param in first.named_parameters() if param.ndim == 2}
    assert stds["embed.weight"] == pytest.approx(0.02, rel=0.1)
    assert stds["layers.0.mlp.down_proj.weight"] == pytest.approx(0.02 / 2, rel=0.1)  # 2 layers: 1 / sqrt(4)
    assert torch.equal(first.norm.weight, torch.ones(SMALL.dim))


def test_seed_gives_the_same_weights_in_another_dtype():
    wide, narrow = Llama3(SMALL), Llama3(SMALL).bfloat16()
    for model in (wide, narrow):
        model.init_weights(7)
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name


def test_rope_tables_stay_out_of_the_state_dict():
    assert not [name for name in Llama3(SMALL).state_dict() if "rope" in name]


def test_a_sequence_above_max_seq_len_is_refused():
    model = Llama3(replace(SMALL, max_seq_len=8))
    with pytest.raises(
        ValueError, match=r"^sequence length 9 is above max_seq_len=8; shorten it or raise max_seq_len$"
    ):
        model(tokens_for(SMALL, 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 3}, "n_heads=3 does not divide dim=64; try n_heads=2 or n_heads=4"),
        ({"n_heads": 65}, "n_heads=65 does not divide dim=64; try n_heads=64"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=4; try n_kv_heads=2 or n_kv_heads=4"),
        ({"dim": 60}, "head_dim=15 (dim=60 / n_heads=4) is odd, RoPE rotates pairs; try dim=64"),
        ({"n_layers": 0}, "n_layers=0 is not positive; use a value above 0"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 is not positive; use a value above 0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan is not positive; use a value above 0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(change, message):
    with pytest.raises(ValueError) as refused:
        replace(SMALL, **change)
    assert str(refused.value) == message


def test_rope_scaling_without_a_band_is_refused():
    with pytest.raises(
        ValueError, match=r"^high_freq_factor=1.0 is not above low_freq_factor=1.0; Llama 3.1 uses 4 and 1$"
    ):
        RopeScaling(factor=8.0, high_freq_factor=1.0)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (models.llama3_1b(), 1_235_814_400),
        (models.llama3_8b(), 8_030_261_248),
        (models.llama3_70b(), 70_553_706_496),
        (models.llama3_405b(), 405_853_388_800),
    ],
    ids=["1b", "8b", "70b", "405b"],
)
def test_parameter_counts_are_the_published_ones(config, published):
    with torch.device("meta"):
        model = Llama3(config)
    assert num_params(model) == config.num_params() == published


def test_debug_model_has_about_6m_parameters_and_learns():
    model = Llama3(models.llama3_debug())
    assert num_params(model) == model.config.num_params() == 6_147_456
    tokens = torch.arange(32).repeat(1, 2) + 65  # the second half repeats the first
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(14):
        loss = models.next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(320.0).log().item(), abs=0.3), "starts near uniform"
    assert losses[-1] < losses[0] / 2
