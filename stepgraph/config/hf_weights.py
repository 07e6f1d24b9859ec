"""Weights in and out of the Hugging Face format: safetensors files next to a ``config.json``.

Tensors are renamed and never permuted: our models keep the layouts of theirs. Experts, which ours stack, are a tensor
each (see `stepgraph.models.Piece`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from stepgraph.errors import require_file
from stepgraph.models import FAMILIES, HuggingFace, Piece
from stepgraph.models.hf_decoder import CONFIG, read_json, write_json
from stepgraph.models.init import Part, whole_part
from stepgraph.models.transformers import CausalLM
from stepgraph.options import differences
from stepgraph.parallel import layouts, local_parts, whole_state
from stepgraph.parallel.ranks import Ranks

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
_ROWS = 4096  # compared at a time

#: Files of weights that are not read -> what to do.
_OTHER_WEIGHTS = {
    "model-*-of-*.safetensors": "its index is missing, download it again",
    "pytorch_model*.bin": "write it again by AutoModelForCausalLM.from_pretrained({folder!r}).save_pretrained(NEW)",
    "*.gguf": "GGUF has rounded weights for inference, use the checkpoint that it was made from",
    "*.pth": "use the folder that has this model in Hugging Face's format",
}
_DTYPES = {"F64", "F32", "F16", "BF16"}  # safetensors' names; anything else is a quantized checkpoint


def load_hf(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read a Hugging Face checkpoint of the same model into ``model`` in place, cast to the model's dtypes.

    ``folder`` holds ``config.json`` and ``model.safetensors``, or shards with ``model.safetensors.index.json`` (the
    single file is read where both exist, as transformers does). Buffers that no checkpoint holds, such as RoPE tables,
    are filled too. With a parallel model every rank reads only its own part, and all ranks must call.

    The model must hold real tensors: a meta model is refused, call ``model.to_empty(device=...)`` first. The
    configuration and every tensor's name, shape and dtype are checked before the first one is written: on
    ``ValueError`` (missing, unexpected or mis-shaped tensors, a corrupt or truncated file, another model) the model is
    unchanged, on every rank.
    """
    folder = Path(folder)
    theirs = _format_of(model, "load_hf")
    parts, ranks = _parts(model), _ranks(model)
    wanted = [(part, piece) for name, part in parts.items() for piece in theirs.pieces_of(name, part.shape)]
    shapes = {piece.name: piece.shape for _, piece in wanted}
    tied = theirs.tied(model.config)

    def check() -> dict[str, _Header]:
        _check_same_model(model.config, theirs.read_config(folder), theirs.free, folder)
        found = _read_headers(folder)
        _check_tensors(shapes, found, folder, tied and tuple(map(theirs.name, tied)), ranks)
        return found

    found = ranks.each(check)
    model.init_buffers()
    _read(wanted, found)


def load_parts(model: CausalLM) -> None:
    """Read what this rank holds of the weights of a model of transformers that was built without them, in place."""
    parts = local_parts(model) | {name: whole_part(buffer) for name, buffer in model.named_buffers()}
    wanted = [(parts[name], piece) for name, pieces in model.pieces_by_name().items() for piece in pieces]
    _read(wanted, _read_headers(Path(model.config.folder)))


def _read(wanted: Sequence[tuple[Part, Piece]], found: Mapping[str, "_Header"]) -> None:
    """Read what each part holds of a piece."""
    by_file: dict[Path, list[tuple[Part, Piece]]] = {}
    for part, piece in wanted:
        if _overlap(part, piece) is not None:  # else it is another rank's
            by_file.setdefault(found[piece.name].file, []).append((part, piece))
    with torch.no_grad():
        for path, here in by_file.items():
            with safe_open(path, framework="pt", device="cpu") as file:
                for part, piece in here:
                    source, target = _overlap(part, piece)
                    part.tensor[target].copy_(file.get_slice(piece.name)[source])


def check_files(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]] | None:
    """Raise ``ValueError``, one line, unless the weights in ``folder`` are whole and none is quantized: transformers
    would read these as numbers. Their shapes; None where ``pytorch_model.bin`` is left to transformers."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in (SINGLE, INDEX)) and any(folder.glob("pytorch_model*.bin")):
        return None
    found = _read_headers(folder)
    for name, header in found.items():
        if name.endswith("weight") and len(header.shape) > 1:
            _check_dtype(name, header)
    return {name: header.shape for name, header in found.items()}


def _parts(model: nn.Module) -> dict[str, Part]:
    """What this rank holds of each tensor that a checkpoint has: parameters, and buffers that are saved with them."""
    saved = model.state_dict().keys()
    buffers = {name: whole_part(buffer) for name, buffer in model.named_buffers() if name in saved}
    return local_parts(model) | buffers


def _overlap(part: Part, piece: Piece) -> tuple[tuple[slice, ...], tuple[slice | int, ...]] | None:
    """What ``part`` holds of ``piece``: (its place in the checkpoint's tensor, in the part's tensor); None: nothing."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.region, piece.region, strict=True)]
    if any(start >= stop for start, stop in common):
        return None
    source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, piece.region, strict=True))
    target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, part.region, strict=True))
    return (source[1:], (target[0].start, *target[1:])) if piece.stacked else (source, target)


def save_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokens: Mapping[str, int | None] | None = None,
) -> None:
    """Write ``model`` as a checkpoint that ``transformers.AutoModelForCausalLM.from_pretrained(folder)`` reads.

    Tensors keep their dtype; a parallel model's have the dtype that they are used in. More than
    ``max_shard_bytes`` of them are split into shards with an index. ``folder`` is made if needed and must not hold
    another checkpoint; ``config.json`` is written last, so that a folder which has one is complete. ``tokens``: its
    ``bos_token_id`` and ``eos_token_id``, which the tokenizer defines and a model does not know.

    With a parallel model all ranks must call, and rank 0 writes: parameters are gathered one at a time, and rank 0
    holds as many of them as one file takes. An error there is raised on every rank.

    Raises ``ValueError`` for a folder that is taken and for a model on meta, ``OSError`` where it cannot be written.
    """
    folder, ranks = Path(folder), _ranks(model)
    theirs = _format_of(model, "save_hf")
    ranks.first(lambda: _make_folder(folder))
    if isinstance(model, CausalLM):
        _save_transformers(model, folder, tokens or {}, ranks)
        return
    params = {name: param.detach() for name, param in model.named_parameters()}
    found, parts = layouts(model), _parts(model)
    dtypes = {name: found[name].param_dtype if name in found else part.tensor.dtype for name, part in parts.items()}
    sizes = {name: part.shape.numel() * dtypes[name].itemsize for name, part in parts.items()}
    shards = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
    ).filename_to_tensors
    weight_map: dict[str, str] = {}
    config = theirs.write_config(model.config, dtypes["embed.weight"]) | dict(tokens or {})
    for file, names in shards.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            whole = found[name].whole(params[name]) if name in found else parts[name].tensor
            pieces = theirs.pieces_of(name, whole.shape)
            weight_map |= {piece.name: file for piece in pieces}
            if ranks.rank == 0:
                whole = whole.cpu()
                tensors |= {piece.name: _cut(whole, piece) for piece in pieces}
            del whole
        ranks.first(lambda file=file, tensors=tensors: _write_shard(tensors, folder / file))
    ranks.first(lambda: _write_rest(config, folder, weight_map, sum(sizes.values())))


def _save_transformers(model: CausalLM, folder: Path, tokens: Mapping[str, int | None], ranks: Ranks) -> None:
    state = whole_state(model, keep=ranks.rank == 0, used=True)
    base: list[nn.Module] = []  # rank 0's
    if model.lora:
        ranks.first(lambda: base.append(model.read_base()))
    for name, weight in model.dequantized():  # the adapter was trained next to the dequantized values
        for one in base:
            one.get_parameter(name).data.copy_(weight)
    ranks.first(lambda: model.save(folder, tokens, state, next(iter(base), None)))


def _cut(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A copy of the part of our ``whole`` tensor that ``piece`` of the checkpoint holds."""
    if piece.shape == whole.shape:
        return whole.contiguous()
    cut = whole[tuple(slice(*span) for span in piece.region)]
    return (cut[0] if piece.stacked else cut).clone(memory_format=torch.contiguous_format)


def _ranks(model: nn.Module) -> Ranks:
    """The ranks that share ``model``; this one alone for a plain model."""
    return Ranks(alone=not layouts(model))


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir())
    taken = [name for name in names if name.endswith(".safetensors") or name in (INDEX, CONFIG)]
    if taken:
        raise ValueError(f"{folder} already holds a checkpoint ({taken[0]}); use a new folder")


def _write_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    partial = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
    except SafetensorError as error:  # of a full disk
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}") from error
    partial.replace(path)


def _write_rest(config: dict[str, Any], folder: Path, weight_map: dict[str, str], total: int) -> None:
    """The index, if there are several files, and the configuration. ``weight_map``: tensor -> file."""
    if len(set(weight_map.values())) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / CONFIG, config)


@dataclass(frozen=True)
class _Header:
    """What a safetensors file says of one tensor before its data is read."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _format_of(model: nn.Module, caller: str) -> HuggingFace:
    """The format of ``model``'s family; ``ValueError`` where it has none, or the model holds no tensors of its own."""
    known = {family.config: family.hugging_face for family in FAMILIES if family.hugging_face}
    found = known.get(type(getattr(model, "config", None)))
    if found is None:
        titles = ", ".join(theirs.title for theirs in known.values())
        raise ValueError(
            f"{caller} takes a model of {titles}, got {type(model).__name__}; use one from stepgraph.models"
        )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{caller}: {name} is on the meta device; call model.to_empty(device=...) first")
    for name, param in model.named_parameters():
        if type(param) is not nn.Parameter and not layouts(model):
            kind = type(param).__name__
            raise ValueError(f"{caller}: {name} is a {kind}; use a model of plain, unsharded tensors, or parallelize()")
    return found


def _check_same_model(ours: Any, theirs: Any, free: Sequence[str], folder: Path) -> None:
    """Compare what the weights depend on; names and shapes alone would not show another head count or RoPE."""
    differing = {name: pair for name, pair in differences(ours, theirs).items() if name not in free}
    if differing:
        found = ", ".join(f"{name} is {there} there and {here} here" for name, (here, there) in differing.items())
        options = ", ".join(f"--model.{name.replace('_', '-')}" for name in differing)
        raise ValueError(f"{folder} holds another model: {found}; build it as it is there ({options})")


def _read_headers(folder: Path) -> dict[str, _Header]:
    """Name, place, shape and dtype of every tensor of the checkpoint; opening a file checks its length too."""
    if (folder / SINGLE).exists():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        found = ((path.name, fix) for form, fix in _OTHER_WEIGHTS.items() for path in sorted(folder.glob(form)))
        name, fix = next(found, ("no other weights", "use a folder with safetensors weights"))
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}, but {name}: {fix.format(folder=str(folder))}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map of tensor to file; download it again")
    found: dict[str, _Header] = {}
    for file in sorted(set(weight_map.values())):
        here = _read_header(folder / file)
        found |= {name: header for name, header in here.items() if weight_map.get(name) == file}
    return found


def _read_header(path: Path) -> dict[str, _Header]:
    if not path.exists():
        raise ValueError(f"{path} is missing; download it again")
    require_file(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {name: _Header(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}); download it again") from None


def _check_tensors(
    wanted: Mapping[str, torch.Size],
    found: dict[str, _Header],
    folder: Path,
    tied: tuple[str, str] | None,
    ranks: Ranks,
) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{folder} lacks {_some(missing)}; use a complete checkpoint of this configuration")
    # Old Llamas saved their RoPE's frequencies, which config.json gives.
    unexpected = [name for name in found if name not in wanted and not name.endswith("rotary_emb.inv_freq")]
    if tied and unexpected == [tied[0]]:
        _check_tied_copy(found, *tied, ranks)
    elif unexpected:
        raise ValueError(f"{folder} holds {_some(unexpected)}, which the model lacks; use a checkpoint of this model")
    for name, shape in wanted.items():
        header = found[name]
        if header.shape != tuple(shape):
            raise ValueError(
                f"{header.file}: {name} has shape {header.shape}, the model needs {tuple(shape)}; "
                "use a checkpoint of this configuration"
            )
        _check_dtype(name, header)


def _check_dtype(name: str, header: _Header) -> None:
    if header.dtype not in _DTYPES:
        raise ValueError(
            f"{header.file}: {name} is stored as {header.dtype}, only {', '.join(sorted(_DTYPES))} are read; "
            "use an unquantized checkpoint"
        )


def _check_tied_copy(found: dict[str, _Header], head_name: str, embedding_name: str, ranks: Ranks) -> None:
    """Some writers store a tied head next to its embedding; take it only as an exact copy. Each of ``ranks`` compares
    its share of the rows."""
    head, embedding = found[head_name], found[embedding_name]
    with (
        safe_open(head.file, framework="pt", device="cpu") as one,
        safe_open(embedding.file, framework="pt", device="cpu") as other,
    ):
        copies = one.get_slice(head_name), other.get_slice(embedding_name)
        rows = range(ranks.rank * _ROWS, embedding.shape[0], ranks.world * _ROWS)
        same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and all(
            torch.equal(*(c[i : i + _ROWS] for c in copies)) for i in rows
        )
    if not same:
        raise ValueError(
            f"{head.file}: {head_name} differs from the embedding, but the model ties them; use tie_embeddings=False"
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
