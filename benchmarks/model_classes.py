"""How many model classes of `transformers` a captured step takes: one or two of each model type that eager trains.

Each class gets a tiny configuration by rules over the names of its options, and a batch by the names of its forward's
arguments. A class that eager does not train so (it cannot be built, its forward fails, or no gradient is finite) is not
counted. The others take one step with ``passes="exact"`` from equal weights and random state, and are

- ``equal``: the loss, each gradient and each buffer are bitwise eager's,
- ``refused``: the capture raised `CaptureError`, with its line, or
- ``different``, ``failed``: a defect of stepgraph.

Writes ``model_classes.json`` next to this file, with the environment; rows of other classes are kept.

    python benchmarks/model_classes.py [CLASS ...] [--new] [--json FILE]
"""

import argparse
import collections
import copy
import inspect
import json
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stepgraph
from stepgraph.config.environment import environment

#: Auto classes, the first that knows a model type gives its class; the classes of `_ALSO` are taken too.
_HEADS = (
    *("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM"),
    *("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION"),
    *("UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "TIME_SERIES_PREDICTION"),
    *("SEQUENCE_CLASSIFICATION", "PRETRAINING", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM"),
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
)
_ALSO = ("CTC", "RNNT", "TDT")

VOCABULARY, ROWS, LENGTH, SIDE = 99, 2, 12, 32
SECONDS = 90  # of processor time for a class
LARGEST = 20_000_000  # parameters

#: A pattern of the name of an option -> its tiny value. The first match counts; None: as it is.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (r"_token_(id|index)$|_ids?$|type_vocab|pad_idx", None),
    (r"vocab_size|^n_vocab$", VOCABULARY),
    (r"^rotary_dim$|(^|_)groups$", 4),
    (r"index_head_dim$", 16),
    (r"^rope|theta|dropout|prob|stride$|^num_channels$|in_channels|num_labels|bias|eps|window_layers", None),
    (r"projection_dim|proj_dim|out_dim$|output_dim$|embedding_size$|proj_size|projection_hidden", 32),
    (r"(num_)?(key_value|kv)_heads$", 2),
    (r"n_heads?$|num_heads?$|attention_heads$|num_.*heads$|^heads$", 4),
    (r"group_size$", None),
    (r"head_dim$|^d_kv$|qk_.*dim$|v_head_dim|size_per_head", 8),
    (r"lora_rank$|_rank$", 16),
    (r"num_experts_per_tok|^moe_k$|moe_top_?k|^top_?k$|experts_top_k|num_selected", 2),
    (r"num_(local_|routed_)?experts$|n_routed_experts$|moe_num_experts$", 4),
    (r"n_shared_experts|num_shared_experts|n_group$|topk_group", 1),
    (r"(intermediate|ffn|inner|mlp|feed_?forward|ff).*(dim|size)$|^d_ff$|^n_inner$|^d_inner$", 48),
    (r"(num_|n_).*layers?$|_layers$|^depth$|^n_layer$|num_.*blocks$|^num_stages_.*", 2),
    (r"max_.*(position|len|length).*|^n_positions$|n_ctx|context_length$|seq_length$|max_seq", 128),
    (r"image_size$|img_size$|^input_size$|^size$", SIDE),
    (r"^patch_size$", 8),
    (r"num_mel_bins|num_mels|feature_size|n_mels", 16),
    (r"hidden_(size|dim)$|^d_model$|^n_embd$|embed_dim$|^dim$|^d_embed$|^width$|_hidden_size$|.*hidden_dim.*|lru_width"
     r"|^embedding_dim$|^codebook_dim$|^d_model$|_dim$|_width$|embed_size|channels$|filters$|embd_pdim", 32),
    (r"codebook_size$", 32),
    (r"num_queries|num_latents|num_query_tokens|query_length|resampler_n_latents|num_position", 16),
    (r"sliding_window$|attention_window|local_attention|window_size$|block_size|chunk_size", 4),
    (r"state_size|d_state|ssm_state", 8),
)  # fmt: skip

#: What the rules do not find, by model type; of the parts of a configuration by their own.
_OPTIONS: dict[str, dict[str, Any]] = {
    "clip_text_model": {"eos_token_id": 2},
    "qwen3_vl": {"deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0, 1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "llama4_vision_model": {"intermediate_size": 128},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 3]},
    "xmod": {"default_language": "en_XX"},
    "nemotron": {"num_key_value_heads": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "blip-2": {"image_token_index": 3},
    "instructblip": {"image_token_index": 3},
    "swin": {"image_size": 64, "window_size": 2},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "perceiver": {"d_latents": 32, "num_latents": 8},
    "glm4v_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
    },
}

_CONV_AUDIO = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
_CONV_AUDIO |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0}
_CONV_AUDIO |= {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False}


#: Options that the default configuration leaves out.
_MISSING = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8}
_MISSING |= {"prediction_length": 8}


def tiny(cls: type, **more: Any) -> Any:
    """A configuration of ``cls`` with few layers and small widths."""
    found: dict[str, Any] = {}
    parts, whole = getattr(cls, "sub_configs", None) or {}, cls()
    names = inspect.signature(cls.__init__).parameters
    for name, parameter in names.items():
        value = parameter.default
        if name in parts:
            if (part := getattr(whole, name, None)) is not None:
                found[name] = tiny(type(part))
        elif name == "apply_spec_augment":  # numpy draws its masks, which a captured step refuses
            found[name] = False
        elif value is None and name in _MISSING:
            found[name] = _MISSING[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            if (small := _small(name)) is not None:
                found[name] = min(value, small) if value > 0 else value
        elif isinstance(value, float) and re.search(r"layer_?drop|drop_path|dropout", name):
            found[name] = 0.0
        elif isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
            found[name] = _small_list(name, value)
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        found["num_key_value_heads"] = 4
    if "conv_dim" in names and "conv_kernel" in names:
        found |= {name: value for name, value in _CONV_AUDIO.items() if name in names}
    kinds = list(dict.fromkeys(getattr(whole, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" in names and "num_hidden_layers" in names:
        found |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    for name, value in vars(whole).items():  # tokens behind the small vocabulary
        if re.search(r"_token_(id|index)$", name) and isinstance(value, int) and value >= VOCABULARY:
            found[name] = 3 + sum(n in found and re.search(r"_token_(id|index)$", n) is not None for n in vars(whole))
    kind = getattr(cls, "model_type", "")
    if re.search(
        r"(glm4v|glm46v|glm_ocr|qwen.*(vl|omni|asr)|qwen3_5|qwen4|cosmos|ernie4_5_vl|paddleocr).*text|thinker", kind
    ):
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    if "use_cache" in vars(whole):
        found["use_cache"] = False
    config = cls(**found | _OPTIONS.get(kind, {}) | more)
    for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 1), ("vocab_size", VOCABULARY)):
        if getattr(config, name, None) is None and name not in parts:
            setattr(config, name, value)
    return config


def _small(name: str) -> int | None:
    return next((size for pattern, size in _SIZES if re.search(pattern, name)), None)


def _small_list(name: str, value: Any) -> Any:
    if re.search(r"depths|layers|blocks", name):
        return type(value)(1 for _ in value)
    if re.search(r"heads", name):
        return type(value)(4 for v in value)
    if re.search(r"hidden_sizes|embed_dim|channels|widths|dims|sizes$", name) and min(value) > 8:
        return type(value)(32 for _ in value)
    return value


def classes() -> dict[str, str]:
    """Model class -> model type."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    seen: set[str] = set()
    for head in (*_HEADS, *_ALSO):
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            if kind in seen and head not in _ALSO:
                continue
            seen.add(kind)
            found.setdefault(names if isinstance(names, str) else names[0], kind)
    for kind, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        parts = re.search(r"_(text|vision|audio|encoder|decoder|model|tokenizer|qformer|talker|thinker)(_|$)", kind)
        if kind not in seen and not parts:
            found.setdefault(names if isinstance(names, str) else names[0], kind)
    return found


def model_of(name: str) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    config = tiny(cls.config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return cls(config).train()


def tokens() -> torch.Tensor:
    return torch.randint(50, VOCABULARY - 4, (ROWS, LENGTH))


def batch_of(model: nn.Module, plain: bool = False) -> dict[str, Any]:
    """Arguments of forward, labels among them."""
    torch.manual_seed(1)
    names, config, kind = inspect.signature(model.forward).parameters, model.config, type(model).__name__
    batch: dict[str, Any] = {}
    image_token = _first(config, "image_token_id", "image_token_index")
    if "input_ids" in names:
        batch["input_ids"] = tokens()
    if "pixel_values" in names and not plain:
        batch |= _pixels(model, names)
        if image_token is not None and "input_ids" in batch:
            count = _features(model, batch)
            batch["input_ids"] = torch.cat([torch.full((ROWS, count // ROWS), image_token), batch["input_ids"]], 1)
            if "mm_token_type_ids" in names:
                batch["mm_token_type_ids"] = (batch["input_ids"] == image_token).int()
            if "token_type_ids" in names:
                batch["token_type_ids"] = (batch["input_ids"] == image_token).long()
    if "input_values" in names and model.main_input_name != "input_ids":
        batch["input_values"] = (
            torch.randn(ROWS, 1, 640) if re.search("[Cc]odec|Mimi|Dac|WavTok", kind) else torch.randn(ROWS, 800)
        )
    if "input_features" in names and (model.main_input_name == "input_features" or "CTC" in kind):
        mels = (
            _first(
                config,
                "num_mel_bins",
                "feature_size",
                "n_mels",
                "feature_projection_input_dim",
                "input_feat_per_channel",
                "input_dim",
            )
            or 16
        )
        times = 2 * (_first(config, "max_source_positions") or 32)
        shape = (mels, times) if "Whisper" in kind or "Moonshine" in kind else (times, mels)
        batch["input_features"] = torch.randn(ROWS, *shape)
        if re.search("CTC|RNNT|TDT", kind):
            batch["attention_mask"] = torch.ones(ROWS, times, dtype=torch.long)
    if "pixel_values_videos" in names and "pixel_values" not in names:
        batch["pixel_values_videos"] = torch.randn(
            ROWS, _first(config, "num_frames", "frames_per_clip") or 8, 3, SIDE, SIDE
        )
    if "qformer_input_ids" in names:
        batch["qformer_input_ids"] = tokens()
    if "bbox" in names:
        batch["bbox"] = torch.zeros(*batch["input_ids"].shape, 4, dtype=torch.long)
    if kind.startswith("AST"):
        batch["input_values"] = torch.randn(ROWS, config.max_length, config.num_mel_bins)
    if "past_time_features" in names:
        length = config.context_length + max(config.lags_sequence)
        features = config.num_time_features
        batch |= {"past_values": torch.randn(ROWS, length), "past_observed_mask": torch.ones(ROWS, length)}
        batch |= {"past_time_features": torch.randn(ROWS, length, features)}
        batch |= {"future_values": torch.randn(ROWS, config.prediction_length)}
        batch |= {"future_time_features": torch.randn(ROWS, config.prediction_length, features)}
    elif "past_values" in names:
        length = getattr(config, "context_length", 32)
        channels = () if "TimesFm" in kind else (_first(config, "num_input_channels", "input_size") or 1,)
        batch["past_values"] = torch.randn(ROWS, length, *channels)
        if "future_values" in names:
            batch["future_values"] = torch.randn(ROWS, getattr(config, "prediction_length", 8), *channels)
    if "decoder_input_ids" in names and "labels" not in names:
        batch["decoder_input_ids"] = tokens()
    if "return_loss" in names:
        batch["return_loss"] = True
    if "labels" in names:
        batch["labels"] = _labels(kind, batch)
    return batch


def _labels(kind: str, batch: dict[str, Any]) -> Any:
    if "Detection" in kind or ("Segmentation" in kind and "Semantic" not in kind):
        return [{"class_labels": torch.tensor([1, 0]), "boxes": torch.rand(2, 4) * 0.4 + 0.1,
                 "masks": (torch.rand(2, SIDE, SIDE) > 0.5).float()} for _ in range(ROWS)]  # fmt: skip
    if "SemanticSegmentation" in kind:
        return torch.randint(2, (ROWS, SIDE, SIDE))
    if "Classification" in kind and "Token" not in kind:
        return torch.randint(2, (ROWS,))
    if "CTC" in kind or "RNNT" in kind or "TDT" in kind:
        return torch.randint(5, 30, (ROWS, 4))
    if "DepthEstimation" in kind:
        return torch.rand(ROWS, SIDE, SIDE)
    return batch["input_ids"].clone() if "input_ids" in batch else tokens()


def _pixels(model: nn.Module, names: Any) -> dict[str, Any]:
    config = getattr(model.config, "vision_config", model.config)
    channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if isinstance(channels, int) else 3
    side = getattr(config, "image_size", None) or SIDE
    side = tuple(side) if isinstance(side, list | tuple) else (side, side)
    if "image_grid_thw" in names:
        patch, time = config.patch_size, getattr(config, "temporal_patch_size", 1)
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        return {"pixel_values": torch.randn(ROWS * 16, channels * time * patch * patch), "image_grid_thw": grid}
    if "image_sizes" in names:
        kind = model.config.model_type
        sizes = torch.tensor([side] * ROWS)
        views = () if kind in ("mistral3", "lighton_ocr", "mistral_large4") else (2,)
        return {"pixel_values": torch.randn(ROWS, *views, channels, *side), "image_sizes": sizes}
    if model.config.model_type in ("idefics2", "idefics3", "smolvlm", "llama4"):
        views = () if model.config.model_type == "llama4" else (1,)
        return {"pixel_values": torch.randn(ROWS, *views, channels, *side)}
    if re.search("Video|TimeSformer|Vivit|VJEPA", type(model).__name__):
        return {"pixel_values": torch.randn(ROWS, getattr(config, "num_frames", 8), channels, *side)}
    return {"pixel_values": torch.randn(ROWS, channels, *side)}


def _features(model: nn.Module, batch: dict[str, Any]) -> int:
    """How many places of the text the images of a batch take."""
    find = getattr(model, "get_image_features", None) or model.model.get_image_features
    names = inspect.signature(find).parameters
    given = {name: value for name, value in batch.items() if name in names}
    with torch.no_grad():
        found = find(**given)
    found = getattr(found, "pooler_output", found)
    if isinstance(found, list | tuple):
        return sum(f.shape[:-1].numel() for f in found)
    return found.shape[:-1].numel()


def _first(config: Any, *names: str) -> Any:
    parts = [
        config,
        *(getattr(config, n, None) for n in ("text_config", "vision_config", "audio_config", "encoder_config")),
    ]
    for part in parts:
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return None


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The model's own loss; without one, the mean square of its results of floating point."""
    out = model(**batch)
    if getattr(out, "loss", None) is not None:
        return out.loss
    found = out.to_tuple() if hasattr(out, "to_tuple") else out if isinstance(out, tuple) else (out,)
    tensors = [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    return sum(t.float().square().mean() for t in tensors if t.is_floating_point() and t.requires_grad)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def measured(name: str) -> dict[str, Any]:
    """What became of a class."""
    try:
        model = model_of(name)
        try:
            batch = batch_of(model)
            trained(copy.deepcopy(model), batch)
        except Exception as error:
            try:
                batch = batch_of(model, plain=True)
                trained(copy.deepcopy(model), batch)
            except Exception:
                raise error from None
    except Exception as error:
        return {"result": "not trained", "line": _line(error)}
    twin = copy.deepcopy(model)
    torch.manual_seed(2)
    expected = trained(model, batch)
    try:
        step = stepgraph.capture(twin, loss_fn, batch, passes="exact")
        torch.manual_seed(2)
        loss = step(batch)
    except stepgraph.CaptureError as error:
        return {"result": "refused", "line": _line(error)}
    except Exception as error:
        return {"result": "failed", "line": _line(error)}
    if not torch.equal(loss, expected):
        return {"result": "different", "line": f"loss {expected.item()!r}, captured {loss.item()!r}"}
    theirs, ours = gradients(model), gradients(twin)
    for key, grad in theirs.items():
        if (grad is None) != (ours[key] is None) or (grad is not None and not torch.equal(grad, ours[key])):
            return {"result": "different", "line": f"gradient of {key}"}
    for (key, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        if not torch.equal(buffer, other):
            return {"result": "different", "line": f"buffer {key}"}
    return {"result": "equal"}


def trained(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of an eager step that leaves gradients; raises if there is none, or none is finite."""
    loss = loss_fn(model, batch)
    loss.backward()
    found = [grad for grad in gradients(model).values() if grad is not None]
    if not loss.isfinite() or not any(grad.any() and grad.isfinite().all() for grad in found):
        raise ValueError(f"loss {loss.item()}, no gradient")
    return loss.detach()


def _line(error: Exception) -> str:
    text = " ".join(str(error).strip().splitlines()[: 1 if isinstance(error, stepgraph.CaptureError) else 2])
    return re.sub(r"\S*site-packages/", "", f"{type(error).__name__}: {text}")[:400]


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="classes (default: all)")
    parser.add_argument("--new", action="store_true", help="only classes that the file does not have")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGPROF, _too_long)
    rows = json.loads(args.json.read_text())["classes"] if args.json.exists() else {}
    about = {"transformers": transformers.__version__, "environment": environment()}
    for name in args.names or classes():
        if args.new and name in rows:
            continue
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            rows[name] = measured(name)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(name, *rows[name].values(), flush=True)
        counts = collections.Counter(row["result"] for row in rows.values())
        trained = len(rows) - counts["not trained"]
        share = {"trained": trained, "refused_percent": round(100 * counts["refused"] / max(trained, 1), 1)}
        args.json.write_text(json.dumps(about | share | {"counts": counts, "classes": rows}, indent=1) + "\n")
    print(
        f"{counts['refused']} of {trained} that eager trains are refused ({share['refused_percent']}%); {dict(counts)}"
    )


if __name__ == "__main__":
    main()
