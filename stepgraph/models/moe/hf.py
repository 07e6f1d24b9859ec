"""Experts in a Hugging Face checkpoint: a tensor for each expert and product, which ours hold stacked; and YaRN."""

from collections.abc import Callable, Sequence
from typing import Any

from stepgraph.models.family import Piece, whole_piece
from stepgraph.models.hf_files import rope_settings
from stepgraph.models.rope import YarnScaling

# Their key -> our field.
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_SCORES_AS_THEY_ARE = {"mscale": 1.0, "mscale_all_dim": 0.0}  # what transformers does without the two


def pieces(hf_name: Callable[[str], str], name: str, shape: Sequence[int]) -> list[Piece]:
    """The tensors of a checkpoint that make up ours called ``name``: of ``experts.gate_up_proj.weight`` (E, 2 F, D),
    ``experts.0.gate_proj.weight`` (F, D), ``experts.0.up_proj.weight``, ``experts.1.gate_proj.weight`` and so on."""
    before, experts, product = hf_name(name).partition(".experts.")
    if not experts:
        return whole_piece(hf_name(name), shape)
    n_experts, rows, width = shape
    parts = {product: (0, rows)}
    if product == "gate_up_proj.weight":
        parts = {"gate_proj.weight": (0, rows // 2), "up_proj.weight": (rows // 2, rows)}
    return [
        Piece(f"{before}.experts.{e}.{part}", ((e, e + 1), span, (0, width)), stacked=True)
        for e in range(n_experts)
        for part, span in parts.items()
    ]


def rope_from_hf(raw: dict[str, Any], *, scales_scores: bool) -> dict[str, Any]:
    """``rope_theta``, and ``rope_scaling`` for YaRN, as transformers reads them from a ``config.json``.

    ``scales_scores``: whether the model's attention scales scores by ``mscale_all_dim``. Raises ``ValueError`` for what
    `YarnScaling` cannot express, ``KeyError`` for a key that is missing.
    """
    theta, kind, rope = rope_settings(raw)
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} is not supported; give a checkpoint with 'default' or 'yarn'")
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    both = bool(mscale and mscale_all_dim)  # their tables heed the two together or not at all
    untold = both if not scales_scores else mscale_all_dim and not mscale
    for key in [key for key in ("attention_factor", "truncate") if rope.get(key) is not None]:
        raise ValueError(f"YaRN with {key}={rope[key]} is not supported; give a checkpoint without {key}")
    if untold:
        raise ValueError(
            f"YaRN with mscale={mscale} and mscale_all_dim={mscale_all_dim} is not supported; give a checkpoint with "
            + ("both or neither" if scales_scores else "neither")
        )
    given = {field: rope[key] for key, field in _YARN.items() if rope.get(key) is not None}
    needed = {_YARN[key]: rope[key] for key in ("factor", "original_max_position_embeddings")}
    return {"rope_theta": theta, "rope_scaling": YarnScaling(**given | needed | ({} if both else _SCORES_AS_THEY_ARE))}


def yarn_to_hf(yarn: YarnScaling | None, *, scales_scores: bool) -> dict[str, Any] | None:
    """``rope_scaling`` of a ``config.json``. ``ValueError`` for settings that transformers' model does not have."""
    if yarn is None:
        return None
    values = {key: getattr(yarn, field) for key, field in _YARN.items()}
    if all(values[key] == value for key, value in _SCORES_AS_THEY_ARE.items()):
        values = {key: value for key, value in values.items() if key not in _SCORES_AS_THEY_ARE}
    elif not scales_scores or not yarn.mscale_all_dim:
        raise ValueError(
            f"Hugging Face has no form for {yarn}: give mscale=1 with mscale_all_dim=0"
            + (", or mscale_all_dim above 0" if scales_scores else "")
        )
    return {"type": "yarn", "rope_type": "yarn", **values}
