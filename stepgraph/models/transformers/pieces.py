"""What the tensors of a checkpoint are of a model of transformers, and the model without memory for its weights.

So a rank reads only its part of each tensor, in place of the model whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stepgraph.models.family import Piece, whole_piece

#: Operations of transformers' conversions, with their dimensions: experts stacked, and then two such stacks joined.
_STACKED, _JOINED = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]


def pieces_of(model: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Piece]] | str:
    """By the names of ``model``, which transformers made, the tensors of a checkpoint of ``shapes``; or why a part of
    its parameters cannot be read as parts of these."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return "this version of transformers does not say how it converts checkpoints"
    transforms, whole = get_model_conversion_mapping(model), model.state_dict()
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    gathered: dict[str, dict[str | None, list[str]]] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, whole)
        if name not in whole and key in whole:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, whole)
        gathered.setdefault(name, {}).setdefault(pattern, []).append(key)
    found: dict[str, list[Piece]] = {}
    tensors = dict(model.named_parameters()) | {n: t for n, t in model.named_buffers() if n in whole}
    for name, tensor in tensors.items():
        keys, shape = gathered.get(name, {}), tuple(tensor.shape)
        if None in keys:
            found[name] = whole_piece(keys[None][0], shape)
        else:
            one = next((c for c in converters if keys.keys() & set(c.source_patterns)), None)
            steps = [(type(op).__name__, getattr(op, "dim", None)) for op in one.operations] if one else []
            if steps not in (_STACKED, _JOINED):
                return f"{name} is not in it, or is made of its tensors by {[kind for kind, _ in steps]}"
            found[name] = _stacked([keys.get(pattern, []) for pattern in one.source_patterns], shapes, shape)
        values = sum(piece.shape.numel() for piece in found[name])
        if values != tensor.numel() or any(tuple(shapes[p.name]) != tuple(p.shape) for p in found[name]):
            return f"{name} has another shape there"
    return found


def _stacked(stacks: list[list[str]], shapes: Mapping[str, Sequence[int]], shape: tuple[int, ...]) -> list[Piece]:
    """One stack of experts' tensors after the other along dimension 1."""
    found, start = [], 0
    for keys in filter(None, stacks):
        stop = start + shapes[keys[0]][0]
        rest = ((start, stop), *((0, size) for size in shape[2:]))
        found += [Piece(key, ((i, i + 1), *rest), stacked=True) for i, key in enumerate(keys)]
        start = stop
    return found


def without_weights(skeleton: nn.Module, folder: str, options: Mapping[str, Any]) -> Any:
    """The model of ``skeleton``, which is on meta, on the CPU: each parameter is one value, seen in its shape."""
    from transformers import GenerationConfig

    named = dict(skeleton.named_parameters())
    blank = {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        if name in named
        else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in skeleton.state_dict().items()
    }
    made = type(skeleton).from_pretrained(None, config=skeleton.config, state_dict=blank, **options)
    if (given := made.generation_config) is not None:
        try:
            made.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:  # the folder has none
            made.generation_config = given
    return made


def cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value`` in ``dtype``; one that has no memory of its own (`without_weights`) still has none."""
    alone = value.numel() > 1 and not any(value.stride())
    return value.as_strided((), ()).to(dtype).expand(value.shape) if alone else value.to(dtype)
