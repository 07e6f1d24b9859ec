"""Generation with a key-value cache, next to the same model without one and next to transformers' own."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from stepgraph.config.hf_weights import save_hf
from stepgraph.models import GolfConfig, Llama3Config, RopeScaling, family_of
from stepgraph.models.decoder import LayerCache
from stepgraph.models.generate import generate, sampler
from tests.models.moe_models import DEEPSEEK, KINDS, QWEN

LLAMA = Llama3Config(
    dim=48, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=96, max_seq_len=64, rope_theta=1e4
)
SCALED = RopeScaling(factor=8.0, original_max_seq_len=16)
MODELS = {
    "llama": LLAMA,
    "llama-scaled-tied": replace(LLAMA, rope_scaling=SCALED, tie_embeddings=True, n_kv_heads=4),
    "golf": GolfConfig(dim=48, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=96, residual_scales=True),
    "deepseek": DEEPSEEK,
    "deepseek-yarn": KINDS["yarn"],
    "qwen": QWEN,
}


def model_of(config):
    """With weights large enough that the likeliest token hangs on the text."""
    torch.manual_seed(3)
    model = family_of(config).model(config).eval()
    for param in model.parameters():
        if param.ndim > 1:
            torch.nn.init.normal_(param, std=0.15)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_without_a_cache(name):
    model, tokens = model_of(MODELS[name]), torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = [LayerCache(12) for _ in model.layers]
    with torch.no_grad():
        expected = model(tokens)
        parts = [model(tokens[:, start:stop], cache) for start, stop in [(0, 5), *((i, i + 1) for i in range(5, 12))]]
    # fp32: attention over a cache sums in another order than over a square.
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "golf"])
def test_greedy_is_transformers_generate_on_exported_weights(name, tmp_path):
    model = model_of(MODELS[name])
    save_hf(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [7, 3, 90, 15, 2]
    made = list(generate(model, prompt, 20, sampler(temperature=0)))
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    assert made == expected and len(set(made)) >= 3
    stop = made[4]
    assert list(generate(model, prompt, 20, sampler(temperature=0), {stop})) == made[: made.index(stop)]


def test_the_prompt_runs_once_and_then_a_token_at_a_time():
    model, seen = model_of(LLAMA), []
    model.embed.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    list(generate(model, [1, 2, 3], 4, sampler(temperature=0)))
    assert seen == [3, 1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-16, 16), min_size=2, max_size=8, unique=True), st.floats(0.05, 1.0), st.floats(0.3, 3))
def test_a_draw_is_of_the_fewest_likeliest_tokens_that_hold_top_p(logits, top_p, temperature):
    logits = [logit / 4 for logit in logits]  # apart by more than rounding
    weights = [math.exp(logit / temperature) for logit in logits]
    shares = sorted(((w / sum(weights), i) for i, w in enumerate(weights)), reverse=True)
    allowed, mass = [], 0.0
    for share, index in shares:
        if allowed and mass >= top_p + 1e-6:
            break
        allowed.append(index)
        mass += share
    choose = sampler(temperature, top_p, seed=1)
    assert {choose(torch.tensor(logits)) for _ in range(30)} <= set(allowed)


def test_draws_have_the_frequencies_of_the_softmax_and_depend_on_the_seed_alone():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    choose, again, other = sampler(0.7, seed=4), sampler(0.7, seed=4), sampler(0.7, seed=5)
    drawn = [choose(logits) for _ in range(4000)]
    assert drawn == [again(logits) for _ in range(4000)] != [other(logits) for _ in range(4000)]
    expected = (logits / 0.7).softmax(dim=0)
    for token, count in Counter(drawn).items():  # five standard deviations
        assert count / 4000 == pytest.approx(expected[token].item(), abs=5 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize("temperature", [1e-31, 1e-40, 1e-300, 5e-324])
def test_next_to_no_temperature_is_none(temperature):
    assert sampler(temperature)(torch.tensor([3.0, 1e9, -2.0, 9e8])) == 1


def test_what_a_cache_cannot_hold_is_refused():
    model = model_of(LLAMA)
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        list(generate(model, [], 3, sampler()))
    cache = [LayerCache(4) for _ in model.layers]
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), cache)
        with pytest.raises(ValueError, match="2 tokens cannot be added at once after 2 others; pass them one by one"):
            model(torch.tensor([[1, 2]]), cache)
        with pytest.raises(ValueError, match=r"5 tokens are more than the cache's 4; make it larger"):
            model(torch.tensor([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match="sequence length 65 is above max_seq_len=64"):
        list(generate(model, [1], 70, sampler(temperature=0)))
