"""How long passes take, compared with the capture: models of ``transformers`` at their real depth, narrow, on a CPU.

Every default pass runs with the check after it, but for Inductor and CUDA graphs, whose time is not ours, and those
that need several processes; norms go to our kernels, and passes for a GPU run as they would on one. Time is the
process's own, and does not depend on widths: nothing is computed, all tensors are fake. Writes ``passes.json`` next to
this file, with the environment it was measured in; rows of models that are not asked for stay.

    python benchmarks/passes.py [--models NAME ...] [--json FILE]
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from stepgraph.config.environment import environment
from stepgraph.lower import StepSpec, rewrite, trace
from stepgraph.passes import Target, configured
from stepgraph.passes.contract import Pass

WIDTHS = dict(hidden_size=32, intermediate_size=48, vocab_size=97, max_position_embeddings=64, num_attention_heads=2)
GROUPED = WIDTHS | dict(num_key_value_heads=1, pad_token_id=0)
EXPERTS = GROUPED | dict(moe_intermediate_size=16, num_experts_per_tok=2)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)

#: Model -> (class of the model, class of its configuration, depth by the configuration's names, the other fields).
MODELS: dict[str, tuple[str, str, dict[str, int], dict[str, Any]]] = {
    "Llama 3.1 405B": ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 126}, GROUPED),
    "Qwen3-MoE 235B": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_hidden_layers": 94}, EXPERTS | dict(
        head_dim=8, num_experts=4)),
    "Mistral Large": ("MistralForCausalLM", "MistralConfig", {"num_hidden_layers": 88}, GROUPED),
    "Falcon 180B": ("FalconForCausalLM", "FalconConfig", {"num_hidden_layers": 80}, dict(
        hidden_size=32, num_attention_heads=2, vocab_size=97)),
    "Qwen3 32B": ("Qwen3ForCausalLM", "Qwen3Config", {"num_hidden_layers": 64}, GROUPED | dict(head_dim=8)),
    "Cohere Command R+": ("CohereForCausalLM", "CohereConfig", {"num_hidden_layers": 64}, GROUPED | dict(
        use_qk_norm=True)),
    "OLMo 2 32B": ("Olmo2ForCausalLM", "Olmo2Config", {"num_hidden_layers": 64}, GROUPED),
    "Gemma 3 27B": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"num_hidden_layers": 62}, GROUPED | dict(head_dim=8)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {"num_hidden_layers": 61}, WIDTHS | dict(
        num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2)),
    "Mixtral 8x22B": ("MixtralForCausalLM", "MixtralConfig", {"num_hidden_layers": 56}, GROUPED | dict(
        num_local_experts=4)),
    "GPT-2 XL": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 48}, dict(n_embd=32, n_head=2, vocab_size=97)),
    "DeBERTa-v2 XXL": ("DebertaV2ForMaskedLM", "DebertaV2Config", {"num_hidden_layers": 48}, WIDTHS | dict(
        relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "Gemma 2 27B": ("Gemma2ForCausalLM", "Gemma2Config", {"num_hidden_layers": 46}, GROUPED | dict(head_dim=16)),
    "GPT-NeoX 20B": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"num_hidden_layers": 44}, WIDTHS),
    "StableLM 2 12B": ("StableLmForCausalLM", "StableLmConfig", {"num_hidden_layers": 40}, GROUPED | dict(
        qk_layernorm=True)),
    "Phi-3 medium": ("Phi3ForCausalLM", "Phi3Config", {"num_hidden_layers": 40}, GROUPED),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"num_hidden_layers": 36}, GROUPED),
    "Phi-2": ("PhiForCausalLM", "PhiConfig", {"num_hidden_layers": 32}, WIDTHS),
    "Nemotron 4 15B": ("NemotronForCausalLM", "NemotronConfig", {"num_hidden_layers": 32}, GROUPED),
    "Whisper large": ("WhisperForConditionalGeneration", "WhisperConfig", {"encoder_layers": 32, "decoder_layers": 32},
        IDS | dict(d_model=32, num_mel_bins=8, encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=97,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=16, decoder_start_token_id=1)),
    "ViT-huge": ("ViTForImageClassification", "ViTConfig", {"num_hidden_layers": 32}, dict(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, image_size=8, patch_size=4)),
    "ModernBERT large": ("ModernBertForMaskedLM", "ModernBertConfig", {"num_hidden_layers": 28}, WIDTHS | IDS | dict(
        cls_token_id=1, sep_token_id=2)),
    "T5 11B": ("T5ForConditionalGeneration", "T5Config", {"num_layers": 24}, dict(
        d_model=32, d_kv=16, d_ff=48, num_heads=2, vocab_size=97, decoder_start_token_id=0)),
    "BERT large": ("BertForMaskedLM", "BertConfig", {"num_hidden_layers": 24}, WIDTHS),
}  # fmt: skip


def model_and_batch(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model in bf16 and a batch of two."""
    model, config, depth, fields = MODELS[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**depth, **fields)).bfloat16().train()
    ids = torch.randint(3, 97, (2, 16))
    if name.startswith("ViT"):
        return made, {"pixel_values": torch.randn(2, 3, 8, 8).bfloat16(), "labels": ids[:, 0] % 2}
    if name.startswith("Whisper"):
        return made, {"input_features": torch.randn(2, 8, 32).bfloat16(), "labels": ids}
    return made, {"input_ids": ids, "labels": ids}


def passes() -> list[Pass]:
    """The default passes, as for a GPU, that one process can run and whose time is ours."""
    found = [p for p in configured(norm="kernel") if p.name not in ("inductor", "cuda_graph")]
    return [replace(p, optional=False) for p in found if not p.needs_process_group]


def measure(name: str) -> dict[str, Any]:
    """Seconds of capture and passes, and the name of the slowest pass."""
    model, batch = model_and_batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gc.collect()
    start = time.process_time()
    spec = StepSpec(model, lambda m, b: m(**b).loss, batch, optimizer, max_grad_norm=1.0, passes=passes())
    program = trace(spec).program
    capture_s = time.process_time() - start
    nodes = sum(1 for _ in program.main.nodes())
    gc.collect()
    start = time.process_time()
    reports = rewrite(program, spec, Target("cuda", memory=80e9)).reports
    passes_s = time.process_time() - start
    slowest = max(reports, key=lambda report: report.apply_s)
    row = {"model": name, "layers": sum(MODELS[name][2].values()), "nodes": nodes, "capture_s": round(capture_s, 2)}
    row |= {"passes_s": round(passes_s, 2), "ratio": round(passes_s / capture_s, 2)}
    row["slowest"] = slowest.name
    return row | {"norms": next(report.matched for report in reports if report.name == "fuse_norm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("passes.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    measure("BERT large")  # what torch imports lazily is loaded now
    kept = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    rows = [row for row in kept if row["model"] not in options.models]
    for name in options.models:
        row = measure(name)
        print(row, flush=True)
        rows.append(row)
        rows.sort(key=lambda row: -row["nodes"])
        options.json.write_text(json.dumps({"rows": rows, "environment": environment()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
