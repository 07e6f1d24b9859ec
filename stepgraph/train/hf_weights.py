"""Llama 3 weights in and out of the Hugging Face format: safetensors files beside a ``config.json``.

Both models keep RoPE in the rotate-half layout, so tensors are renamed and never permuted.
"""

import json
import os
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from stepgraph.models.llama3 import Llama3, Llama3Config
from stepgraph.models.rope import RopeScaling

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9

# Ours -> Hugging Face's. Inside a block, "layers.7.attn" becomes "model.layers.7.self_attn", and so on.
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}
_DTYPES = {"F64", "F32", "F16", "BF16"}  # safetensors' names; anything else is a quantized checkpoint


def hf_name(name: str) -> str:
    """Hugging Face's name for our parameter, such as ``layers.7.attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join(["model", "layers", parts[1], _BLOCK[parts[2]], *parts[3:]])
    return ".".join([_OUTER[parts[0]], *parts[1:]])


def config_from_hf(folder: str | os.PathLike[str]) -> Llama3Config:
    """The configuration that ``folder/config.json`` describes; ``attention`` is left at its default.

    Raises ``ValueError`` where the file is missing or unreadable, or describes a model that :class:`Llama3` is not.
    """
    path = Path(folder) / CONFIG
    raw = _read_json(path)
    for key, needed in {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }.items():
        if raw.get(key, needed) != needed or (key == "model_type" and key not in raw):
            raise ValueError(f"{path}: {key} is {raw.get(key)!r}, Llama 3 has {needed!r}; give a Llama 3 checkpoint")
    try:
        config = Llama3Config(
            dim=raw["hidden_size"],
            n_layers=raw["num_hidden_layers"],
            n_heads=raw["num_attention_heads"],
            n_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            ffn_dim=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            max_seq_len=raw["max_position_embeddings"],
            norm_eps=raw["rms_norm_eps"],
            tie_embeddings=raw.get("tie_word_embeddings", False),
            **_rope_from_hf(raw),
        )
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; give the config.json of a Llama 3 checkpoint") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if raw.get("head_dim") not in (None, config.head_dim):
        raise ValueError(
            f"{path}: head_dim={raw['head_dim']} is not hidden_size / num_attention_heads = {config.head_dim}; "
            "give a Llama 3 checkpoint"
        )
    return config


def load_hf(model: Llama3, folder: str | os.PathLike[str]) -> None:
    """Read a Hugging Face Llama 3 checkpoint into ``model`` in place, cast to the model's dtypes.

    ``folder`` holds ``config.json`` and ``model.safetensors``, or shards with ``model.safetensors.index.json`` (the
    single file is read where both exist, as transformers does). The RoPE tables are filled too.

    The model must hold real, plain tensors: a meta model is refused, call ``model.to_empty(device=...)`` first. The
    configuration and every tensor's name, shape and dtype are checked before the first one is written: on
    ``ValueError`` (missing, unexpected or mis-shaped tensors, a corrupt or truncated file, another model) the model is
    unchanged.
    """
    folder = Path(folder)
    _check_model(model, "load_hf")
    _check_same_model(model.config, config_from_hf(folder), folder)
    found = _read_headers(folder)
    wanted = {hf_name(name): param for name, param in model.named_parameters()}
    _check_tensors(wanted, found, folder, tied=model.config.tie_embeddings)

    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(found[name].file, []).append(name)
    with torch.no_grad():
        for path, names in by_file.items():
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in names:
                    wanted[name].copy_(file.get_tensor(name))
    model.init_buffers()


def save_hf(model: Llama3, folder: str | os.PathLike[str], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write ``model`` as a checkpoint that ``transformers.LlamaForCausalLM.from_pretrained(folder)`` reads.

    Tensors keep their dtype. More than ``max_shard_bytes`` of them are split into shards with an index. ``folder`` is
    made if needed and must not hold another checkpoint; ``config.json`` is written last, so that a folder which has one
    is complete. Raises ``ValueError`` for a folder that is taken and for a model on meta or with DTensors.
    """
    folder = Path(folder)
    _check_model(model, "save_hf")
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir())
    taken = [name for name in names if name.endswith(".safetensors") or name in (INDEX, CONFIG)]
    if taken:
        raise ValueError(f"{folder} already holds a checkpoint ({taken[0]}); give a new folder")

    tensors = {hf_name(name): param.detach() for name, param in model.named_parameters()}
    shards = _split(tensors, max_shard_bytes)
    n = len(shards)
    files = [SINGLE] if n == 1 else [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
    for file, names in zip(files, shards, strict=True):
        partial = folder / f"{file}.part"
        save_file({name: tensors[name].cpu().contiguous() for name in names}, partial, metadata={"format": "pt"})
        partial.replace(folder / file)
    if n > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / CONFIG, _config_to_hf(model.config, model.embed.weight.dtype))


@dataclass(frozen=True)
class _Header:
    """What a safetensors file says of one tensor before its data is read."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _check_model(model: nn.Module, caller: str) -> None:
    if not isinstance(model, Llama3):
        raise ValueError(f"{caller} takes a Llama3 model, got {type(model).__name__}; build one with Llama3(config)")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{caller}: {name} is on the meta device; call model.to_empty(device=...) first")
    for name, param in model.named_parameters():
        if type(param) is not nn.Parameter:
            raise ValueError(f"{caller}: {name} is a {type(param).__name__}; give a model of plain, unsharded tensors")


def _check_same_model(ours: Llama3Config, theirs: Llama3Config, folder: Path) -> None:
    """Compare what the weights depend on; names and shapes alone would not show another head count or RoPE."""
    free = {"max_seq_len", "attention"}
    differing = [
        f"{field.name} is {getattr(theirs, field.name)} there and {getattr(ours, field.name)} here"
        for field in fields(Llama3Config)
        if field.name not in free and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if differing:
        raise ValueError(f"{folder} holds another model: {', '.join(differing)}; build it with config_from_hf(folder)")


def _read_headers(folder: Path) -> dict[str, _Header]:
    """Name, place, shape and dtype of every tensor of the checkpoint; opening a file checks its length too."""
    if (folder / SINGLE).exists():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map of tensor to file; download it again")
    found: dict[str, _Header] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ValueError(f"{folder / INDEX} names {file!r}, which is not a file of the folder; download it again")
        for name, header in _read_header(folder / file).items():
            if weight_map.get(name) != file:
                raise ValueError(
                    f"{folder / file} holds {name}, which the index does not place there; download it again"
                )
            found[name] = header
    for name, file in weight_map.items():
        if name not in found:
            raise ValueError(f"{folder / file} lacks {name}, which the index places there; download it again")
    return found


def _read_header(path: Path) -> dict[str, _Header]:
    if not path.exists():
        raise ValueError(f"{path} is missing; download it again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {name: _Header(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}); download it again") from None


def _check_tensors(wanted: dict[str, nn.Parameter], found: dict[str, _Header], folder: Path, tied: bool) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{folder} lacks {_some(missing)}; give a complete Llama 3 checkpoint of this configuration")
    unexpected = [name for name in found if name not in wanted]
    if tied and unexpected == ["lm_head.weight"]:
        _check_tied_copy(found)
    elif unexpected:
        raise ValueError(f"{folder} holds {_some(unexpected)}, which the model lacks; give a checkpoint of this model")
    for name, param in wanted.items():
        header = found[name]
        if header.shape != tuple(param.shape):
            raise ValueError(
                f"{header.file}: {name} has shape {header.shape}, the model needs {tuple(param.shape)}; "
                "give a checkpoint of this configuration"
            )
        if header.dtype not in _DTYPES:
            raise ValueError(
                f"{header.file}: {name} is stored as {header.dtype}, only {', '.join(sorted(_DTYPES))} are read; "
                "give an unquantized checkpoint"
            )


def _check_tied_copy(found: dict[str, _Header]) -> None:
    """Some writers store a tied head beside its embedding; take it only as an exact copy."""
    copies = []
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with safe_open(found[name].file, framework="pt", device="cpu") as file:
            copies.append(file.get_tensor(name))
    if not torch.equal(*copies):
        raise ValueError(
            f"{found['lm_head.weight'].file}: lm_head.weight differs from the embedding, but the model ties them; "
            "use tie_embeddings=False"
        )


def _some(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _split(tensors: dict[str, torch.Tensor], max_bytes: int) -> list[list[str]]:
    """Names grouped in order, each group at most ``max_bytes`` (or one tensor that is larger)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _rope_from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``: in one table from transformers 5 on, two keys before."""
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    theta = rope.get("rope_theta") or 10_000.0  # the default of transformers' LlamaConfig
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; give a checkpoint with 'default' or 'llama3'")
    scaling = RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _config_to_hf(config: Llama3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of ``config``, in the keys that transformers 4 and 5 both read."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "tie_word_embeddings": config.tie_embeddings,
        # Which ids begin and end a text is the tokenizer's to say; the defaults would be Llama 2's.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path} is missing; give the folder of a Hugging Face checkpoint")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; download it again")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
