"""Tiny models of `transformers`, one row an architecture: what the captured step is compared with eager on.

Each is the unmodified class, from a configuration of two layers and a width of 32 with random weights, in training mode
with the dropout of its default configuration. The loss is the model's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.capture.architecture_batches import (
    SEQUENCES,
    VOCABULARY,
    causal,
    choices,
    classes,
    images,
    masked,
    pairs,
    pictures_and_types,
    pictures_in_text,
    segments,
    series,
    spans,
    spectrograms,
    token_classes,
    translation,
    waves,
)


@dataclass(frozen=True)
class Architecture:
    """``model`` and ``config``: names of classes of `transformers`. ``options``: of the configuration. ``batch`` makes
    the keyword arguments of forward, labels among them. ``kind``: what it is used for. ``quick``: CI takes it.
    ``refused``: what the one line says of a model that cannot be captured."""

    name: str
    kind: str
    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[], dict[str, Any]]
    quick: bool = False
    refused: str = ""

    def build(self) -> torch.nn.Module:
        """The model in training mode, with random weights."""
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config).train()


def loss_fn(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The model's own loss."""
    return model(**batch).loss


DECODER = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
DECODER |= {"intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64, "head_dim": 8}
DECODER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FULL = {key: value for key, value in DECODER.items() if key not in ("num_key_value_heads", "head_dim")}
ENCODER = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
TEXT = {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**ENCODER, "image_size": 16, "patch_size": 4, "num_channels": 3}
OLD = {"vocab_size": VOCABULARY, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {**SPECIAL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SEQ2SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
SEQ2SEQ |= {"decoder_start_token_id": 1, "forced_eos_token_id": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
AUDIO = {**ENCODER, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
AUDIO |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False}
AUDIO |= {"vocab_size": VOCABULARY, "num_labels": 2, "classifier_proj_size": 16, "layerdrop": 0.0}
MOE = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION_TEXT = {"text_config": TEXT | {"projection_dim": 16}, "vision_config": IMAGE | {"projection_dim": 16}}
VISION_TEXT |= {"projection_dim": 16}
STATE = {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


def _decoder(name: str, prefix: str, options: dict[str, Any] = DECODER, **more: Any) -> Architecture:
    model, config = more.pop("model", f"{prefix}ForCausalLM"), more.pop("config", f"{prefix}Config")
    return Architecture(name, "causal LM", model, config, options, causal, **more)


def _encoder(name: str, prefix: str, head: str, batch: Callable, options: dict = TEXT, **more: Any) -> Architecture:
    return Architecture(name, "encoder", f"{prefix}For{head}", f"{prefix}Config", options, batch, **more)


def _seq2seq(name: str, prefix: str, options: dict[str, Any] = SEQ2SEQ, **more: Any) -> Architecture:
    head = more.pop("head", "ForConditionalGeneration")
    return Architecture(name, "encoder-decoder", prefix + head, f"{prefix}Config", options, translation, **more)


def _vision(name: str, prefix: str, options: dict = IMAGE, batch: Callable | None = None, **more: Any) -> Architecture:
    head = more.pop("head", "ForImageClassification")
    return Architecture(name, "vision", prefix + head, f"{prefix}Config", options, batch or images(), **more)


ARCHITECTURES = [
    _decoder("Llama", "Llama", quick=True),
    _decoder("Mistral", "Mistral", DECODER | {"sliding_window": 6}),
    _decoder("Qwen2", "Qwen2"),
    _decoder("Qwen3", "Qwen3"),
    _decoder("Gemma", "Gemma"),
    _decoder("Gemma 2", "Gemma2", DECODER | {"sliding_window": 6}),
    _decoder("Gemma 3", "Gemma3", DECODER | {"sliding_window": 6}, config="Gemma3TextConfig", quick=True),
    _decoder("SmolLM3", "SmolLM3"),
    _decoder("Phi-3", "Phi3", DECODER | {"resid_pdrop": 0.1}),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("Granite", "Granite"),
    _decoder("Cohere", "Cohere"),
    _decoder("GLM", "Glm"),
    _decoder("StableLM", "StableLm", FULL | {"num_key_value_heads": 4}),
    _decoder("StarCoder2", "Starcoder2", DECODER | {"residual_dropout": 0.1}),
    _decoder("Nemotron", "Nemotron"),
    _decoder("GPT-2", "GPT2", OLD | {"n_embd": 32, "n_head": 4, "n_layer": 2}, model="GPT2LMHeadModel", quick=True),
    _decoder("GPT-J", "GPTJ", OLD | {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}),
    _decoder(
        "GPT-Neo", "GPTNeo", FULL | {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    ),
    _decoder("GPT-NeoX", "GPTNeoX", FULL),
    _decoder(
        "OPT",
        "OPT",
        SPECIAL
        | {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    _decoder("BLOOM", "Bloom", SPECIAL | {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1}),
    _decoder("Falcon", "Falcon", SPECIAL | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    _decoder("MPT", "Mpt", SPECIAL | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    _decoder("CodeGen", "CodeGen", OLD | {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}),
    _decoder("Mamba", "Mamba", STATE),
    _decoder("Mamba 2", "Mamba2", STATE | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    _decoder("Falcon Mamba", "FalconMamba", STATE),
    _decoder(
        "RWKV",
        "Rwkv",
        SPECIAL | {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 32},
    ),
    _decoder(
        "RecurrentGemma",
        "RecurrentGemma",
        DECODER | {"num_hidden_layers": 3, "attention_window_size": 6, "lru_width": 32},
    ),
    _decoder(
        "DBRX",
        "Dbrx",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCABULARY}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}
        | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
        refused="asks which experts have tokens",
    ),
    _decoder(
        "Jamba",
        "Jamba",
        FULL
        | {
            "num_key_value_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
    ),
    _decoder("Mixtral", "Mixtral", DECODER | {"num_local_experts": 4}),
    _decoder("Qwen3-MoE", "Qwen3Moe", MOE),
    _decoder("OLMoE", "Olmoe", MOE),
    _decoder("GPT-OSS", "GptOss", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    _decoder(
        "DeepSeek-V3",
        "DeepseekV3",
        FULL
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    _seq2seq("T5", "T5", T5, quick=True),
    _seq2seq("mT5", "MT5", T5),
    _seq2seq("BART", "Bart"),
    _seq2seq("mBART", "MBart"),
    _seq2seq("Marian", "Marian", head="MTModel"),
    _seq2seq("Pegasus", "Pegasus"),
    _seq2seq("BlenderbotSmall", "BlenderbotSmall"),
    _encoder("BERT (MLM)", "Bert", "MaskedLM", masked, quick=True),
    _encoder("BERT (classification)", "Bert", "SequenceClassification", classes),
    _encoder("BERT (tokens)", "Bert", "TokenClassification", token_classes),
    _encoder("BERT (questions)", "Bert", "QuestionAnswering", spans),
    _encoder("BERT (choice)", "Bert", "MultipleChoice", choices),
    _encoder("RoBERTa", "Roberta", "MaskedLM", masked),
    _encoder("XLM-RoBERTa", "XLMRoberta", "SequenceClassification", classes),
    _encoder(
        "ModernBERT",
        "ModernBert",
        "MaskedLM",
        masked,
        TEXT
        | {
            "global_attn_every_n_layers": 2,
            "local_attention": 4,
            "attn_implementation": "sdpa",
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    _encoder(
        "DeBERTa-v2",
        "DebertaV2",
        "MaskedLM",
        masked,
        TEXT | {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    _encoder("ELECTRA", "Electra", "MaskedLM", masked, TEXT | {"embedding_size": 16}),
    _encoder("ALBERT", "Albert", "MaskedLM", masked, TEXT | {"embedding_size": 16, "hidden_dropout_prob": 0.1}),
    _encoder(
        "DistilBERT",
        "DistilBert",
        "SequenceClassification",
        classes,
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_heads": 4,
            "n_layers": 2,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    _encoder("MPNet", "MPNet", "MaskedLM", masked),
    _encoder(
        "Longformer",
        "Longformer",
        "MaskedLM",
        masked,
        TEXT | {"attention_window": 4},
    ),
    _encoder("BigBird", "BigBird", "MaskedLM", masked, TEXT | {"attention_type": "original_full"}),
    _encoder("LayoutLM", "LayoutLM", "TokenClassification", token_classes),
    _vision("ViT", "ViT", quick=True),
    _vision("DeiT", "DeiT"),
    _vision("BEiT", "Beit"),
    _vision("DINOv2", "Dinov2", IMAGE | {"mlp_ratio": 2, "drop_path_rate": 0.1}),
    _vision(
        "Swin",
        "Swin",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2},
    ),
    _vision(
        "ConvNeXt",
        "ConvNext",
        {"num_channels": 3, "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "drop_path_rate": 0.1},
        images(32),
        quick=True,
    ),
    _vision(
        "ConvNeXt V2",
        "ConvNextV2",
        {"num_channels": 3, "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2},
        images(32),
    ),
    _vision(
        "ResNet",
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        images(32),
    ),
    _vision(
        "PoolFormer",
        "PoolFormer",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
        },
        images(32),
    ),
    _vision(
        "MobileNetV2",
        "MobileNetV2",
        {"image_size": 32, "depth_multiplier": 0.25, "finegrained_output": False},
        images(32),
    ),
    _vision(
        "ViT MAE",
        "ViTMAE",
        IMAGE
        | {
            "decoder_hidden_size": 16,
            "decoder_intermediate_size": 24,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
        },
        lambda: {"pixel_values": torch.randn(SEQUENCES, 3, 16, 16)},
        head="ForPreTraining",
    ),
    _vision(
        "SegFormer",
        "Segformer",
        {
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "num_encoder_blocks": 2,
            "decoder_hidden_size": 16,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
        },
        segments,
        head="ForSemanticSegmentation",
    ),
    Architecture("CLIP", "images and text", "CLIPModel", "CLIPConfig", VISION_TEXT, pairs, quick=True),
    Architecture("SigLIP", "images and text", "SiglipModel", "SiglipConfig", VISION_TEXT, pairs),
    Architecture(
        "LLaVA",
        "images and text",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": DECODER | {"model_type": "llama"},
            "vision_config": IMAGE | {"model_type": "clip_vision_model"},
            "image_token_index": 3,
            "vision_feature_layer": -1,
        },
        pictures_in_text(),
    ),
    Architecture(
        "PaliGemma",
        "images and text",
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": DECODER | {"model_type": "gemma"},
            "vision_config": IMAGE | {"model_type": "siglip_vision_model", "projection_dim": 32},
            "image_token_index": 3,
            "projection_dim": 32,
        },
        pictures_and_types,
    ),
    Architecture("Wav2Vec2", "audio", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", AUDIO, waves()),
    Architecture("HuBERT", "audio", "HubertForSequenceClassification", "HubertConfig", AUDIO, waves()),
    Architecture("WavLM", "audio", "WavLMForSequenceClassification", "WavLMConfig", AUDIO, waves()),
    Architecture(
        "AST",
        "audio",
        "ASTForAudioClassification",
        "ASTConfig",
        ENCODER | {"patch_size": 4, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
        lambda: {"input_values": torch.randn(SEQUENCES, 16, 8), "labels": torch.randint(2, (SEQUENCES,))},
    ),
    Architecture(
        "Whisper",
        "audio",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ
        | {
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        spectrograms,
    ),
    Architecture(
        "PatchTST",
        "time series",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
            "loss": "mse",
        },
        series,
    ),
]
