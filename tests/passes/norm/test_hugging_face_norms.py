"""Norms of unmodified models of ``transformers``: every one is found, and finding them costs no more per layer the
deeper a model is."""

from collections import Counter
from typing import Any

import pytest
import torch

from stepgraph.capture import StepGraph, trace_step
from stepgraph.passes import run_passes
from stepgraph.passes.norm import algebra
from stepgraph.passes.norm.composite import find
from stepgraph.passes.norm.rewrite import Found
from tests.passes.norm.norm_checks import CLEAN, KERNEL, check, report_of

transformers = pytest.importorskip("transformers")

VOCABULARY = 37
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
TEXT = SIZES | dict(vocab_size=VOCABULARY, max_position_embeddings=32)
GROUPED = TEXT | dict(num_key_value_heads=1, pad_token_id=0)
T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0)

#: Class of the model, class of its configuration and what it is given.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertForMaskedLM", "BertConfig", TEXT),
    "Cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),
    "Cohere, queries and keys": ("CohereForCausalLM", "CohereConfig", GROUPED | dict(use_qk_norm=True)),
    "DeBERTa": ("DebertaV2ForMaskedLM", "DebertaV2Config", TEXT | dict(relative_attention=True)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", TEXT | dict(
        num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=2)),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {k: v for k, v in TEXT.items() if k != "intermediate_size"}),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | dict(head_dim=8)),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | dict(head_dim=8)),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY)),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "ModernBERT": ("ModernBertForMaskedLM", "ModernBertConfig", TEXT | dict(
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)),
    "Nemotron": ("NemotronForCausalLM", "NemotronConfig", GROUPED),
    "OLMo": ("OlmoForCausalLM", "OlmoConfig", GROUPED),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "Phi": ("PhiForCausalLM", "PhiConfig", TEXT),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | dict(head_dim=8)),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "StableLM, queries and keys": ("StableLmForCausalLM", "StableLmConfig", GROUPED | dict(qk_layernorm=True)),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "T5 without dropout": ("T5ForConditionalGeneration", "T5Config", T5 | dict(dropout_rate=0.0)),
    "ViT": ("ViTForImageClassification", "ViTConfig", SIZES | dict(image_size=8, patch_size=4, num_labels=3)),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", dict(
        vocab_size=VOCABULARY, d_model=16, num_mel_bins=8, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1)),
}  # fmt: skip


def model_and_batch(name: str, **options: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model, config, given = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**given | options)).train()
    ids = torch.randint(3, VOCABULARY, (2, 8))
    if name == "ViT":
        return made, {"pixel_values": torch.randn(2, 3, 8, 8), "labels": ids[:, 0] % 3}
    if name == "Whisper":
        pytest.importorskip("transformers", minversion="5.20")  # earlier: LayerDrop draws at any rate
        return made, {"input_features": torch.randn(2, 8, 32), "labels": ids}
    return made, {"input_ids": ids, "labels": ids}


def own_loss(model, batch):
    return model(**batch).loss


def norms_called(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """How often a forward calls modules that are norms by name and hold no others."""
    called = Counter()
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    for module in norms:
        if not any("Norm" in type(inner).__name__ for inner in module.modules() if inner is not module):
            module.register_forward_hook(lambda *_: called.update(["norm"]))
    model(**batch)
    return called["norm"]


@pytest.mark.parametrize("name", MODELS)
def test_every_norm_is_found(name):
    model, batch = model_and_batch(name)
    step = trace_step(model, own_loss, batch).step
    run_passes(step, CLEAN)
    found = find(step.graph)
    assert [f.why for f in found if not isinstance(f, Found)] == []
    assert len(found) == norms_called(model, batch) > 2
    for norm in found:
        assert norm.outputs and norm.gradient.dx is not None
        assert (norm.weight is None) == (norm.gradient.dw is None)


@pytest.mark.parametrize("name", ["T5 without dropout", "Cohere, queries and keys"])
def test_gradients_of_scaled_outputs_and_of_one_head(name):
    """T5 multiplies its last norm's result with a number; one key head makes a weight of shape (1, N)."""
    model, batch = model_and_batch(name)
    assert report_of(check(model, own_loss, batch, KERNEL)).changed > 0


def terms_of(step: StepGraph, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(norms found whole, terms of polynomials written while finding them)."""
    terms, put = 0, algebra._put

    def counted(*arguments: Any) -> None:
        nonlocal terms
        terms += 1
        assert terms < 10**6, "terms multiply: without a limit this would not end"
        put(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(algebra, "_put", counted)
        return sum(isinstance(f, Found) and f.gradient is not None for f in find(step.graph)), terms


def gemma(layers: int) -> StepGraph:
    """A Gemma 3 in bf16: four norms and two of heads in each layer."""
    model, batch = model_and_batch("Gemma 3", num_hidden_layers=layers)
    step = trace_step(model.bfloat16(), own_loss, batch).step
    run_passes(step, CLEAN)
    return step


def test_work_is_linear_in_depth(monkeypatch):
    """Norm after norm, with a residual stream that leads through all of them in both directions."""
    few, terms = terms_of(gemma(4), monkeypatch)
    many, more = terms_of(gemma(12), monkeypatch)
    assert (few, many) == (25, 73)
    assert more / many < 1.1 * terms / few


class NormsOfNorms(torch.nn.Module):
    """Layer norms of layer norms, each a sum of terms that the next one squares: without a cut they would multiply."""

    def __init__(self, n: int):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.rand(8) + 0.5 for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., 8) -> (..., 8)
        for weight in self.weights:
            centered = x - x.mean(-1, keepdim=True)
            x = centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * weight + weight.exp()
        return x


def test_work_is_linear_in_norms_of_norms(monkeypatch):
    counts = []
    for n in (6, 12, 24):
        step = trace_step(NormsOfNorms(n), lambda m, b: m(b["x"]).square().mean(), {"x": torch.randn(2, 3, 8)}).step
        run_passes(step, CLEAN)
        norms, terms = terms_of(step, monkeypatch)
        assert norms == n
        counts.append(terms)
    few, more, most = counts
    assert few > 6
    # Each norm beyond the first few costs what the one before it does.
    assert (most - more) / 12 <= 1.1 * (more - few) / 6
