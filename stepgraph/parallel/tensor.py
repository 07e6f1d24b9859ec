"""Tensor parallelism by a plan: patterns of module paths and how the modules they name are split.

Between blocks every rank holds its part of the sequence, (B, T / tp, D): norms and residual additions work on that part
(sequence parallelism). Before attention and feed-forward the sequence is gathered; their first matrices are split by
columns (whole heads), their last by rows, and its partial sums are reduced and scattered over the sequence again.
All tensors that the model sees are plain local ones: no operator of the model runs on DTensors.

Source: Shoeybi et al., "Megatron-LM", 2019, for the split; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022, for sequence parallelism.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stepgraph.errors import unknown_name

SEQUENCE = 1  # dimension of the sequence in activations (B, T, D)
_PLACE = "tp_place"


def register_place(module: nn.Module, place: torch.Tensor, name: str = _PLACE) -> None:
    """Keep ``place``, a rank's along ``tp`` (or another axis) as a scalar int64, in a buffer ``name`` of ``module``
    that is in no checkpoint: an input of the graph, so that all ranks have the same one."""
    module.register_buffer(name, place, persistent=False)


def place_in(model: nn.Module, place: str = _PLACE) -> torch.Tensor | None:
    """This rank's place along ``tp``, as the modules of a parallel ``model`` keep it in ``place``; None where they do
    not."""
    return next((buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == place), None)


def gather_sequence(x: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """(B, T / tp, D) -> (B, T, D) on every rank; backward sums the ranks' gradients and keeps this rank's part."""
    x, dim, batch = _one_sequence(x)
    part = DTensor.from_local(x, tp, [Shard(dim)], run_check=False)
    x = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return x.unflatten(0, (1, -1)) if batch == 1 else x


def scatter_sequence(x: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """(B, T, D), a partial sum on every rank -> (B, T / tp, D), this rank's part of the sum; backward gathers."""
    x, dim, batch = _one_sequence(x)
    terms = DTensor.from_local(x, tp, [Partial()], run_check=False)
    x = terms.redistribute(placements=[Shard(dim)]).to_local()
    return x.unflatten(0, (1, -1)) if batch == 1 else x


def _one_sequence(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(x, the dimension of the sequence, batch size). Without a batch dimension that counts, parts of a sequence are
    contiguous, and collectives need no copies around them."""
    return (x.flatten(0, 1), 0, 1) if x.shape[0] == 1 else (x, SEQUENCE, x.shape[0])


@dataclass(frozen=True)
class Style:
    """How a module is split. ``split``: the dimension of each of its parameters that is split over ``tp``, for those
    that are; the others are whole on every rank, their gradients summed. ``kind``: the module it is for, None: any.
    ``forward``: called as ``forward(module, base, tp, *args)`` in place of ``base(*args)``. ``placed``: it reads this
    rank's place along ``tp`` (see `register_place`)."""

    split: Mapping[str, int]
    kind: type | None = None
    forward: Callable | None = None
    placed: bool = False


def _rows(module: nn.Linear, base: Callable, tp: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    y = scatter_sequence(F.linear(x, module.weight), tp)
    return y if module.bias is None else y + module.bias  # once, not once per rank


def _embedding(module: nn.Embedding, base: Callable, tp: DeviceMesh, tokens: torch.Tensor) -> torch.Tensor:
    """Each rank looks up the tokens of its rows; the others' are zeros, and the sum has all."""
    if tokens.shape[SEQUENCE] % tp.size():
        raise ValueError(
            f"tp={tp.size()} does not divide the sequence length {tokens.shape[SEQUENCE]}; "
            f"try {tokens.shape[SEQUENCE] // tp.size() * tp.size() or tp.size()}"
        )
    weight = module.weight
    rows = weight.shape[0]
    index = tokens - module.tp_place * rows
    elsewhere = (index < 0) | (index >= rows)
    x = F.embedding(index.masked_fill(elsewhere, 0), weight)  # (B, T, D)
    return scatter_sequence(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), tp)


def _sequence_gather(module: nn.Module, base: Callable, tp: DeviceMesh, *args: torch.Tensor) -> torch.Tensor:
    return gather_sequence(base(*args), tp)


#: What a plan may say of a module.
STYLES: dict[str, Style] = {
    # Output features split: each rank has whole heads, or part of the hidden units or of the vocabulary.
    "columns": Style({"weight": 0, "bias": 0}, nn.Linear),
    # Input features split; the partial outputs are summed and scattered over the sequence.
    "rows": Style({"weight": 1}, nn.Linear, _rows),
    # The table's rows split; the output is scattered over the sequence.
    "embedding": Style({"weight": 0}, nn.Embedding, _embedding, placed=True),
    # Works on this rank's part of the sequence or of the heads, with all of its parameters.
    "sequence": Style({}),
    # The same, and its output is gathered over the sequence.
    "sequence_gather": Style({}, forward=_sequence_gather),
}


def _matches(path: str, pattern: str) -> bool:
    """Whether ``pattern`` fits, each of its parts one part of the path: ``layers.*`` is a block and nothing in it."""
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def style_of(path: str, module: nn.Module, plan: Mapping[str, str]) -> Style | None:
    """The style that the first matching pattern of ``plan`` gives the module at ``path``; None where none matches."""
    for pattern, name in plan.items():
        if not _matches(path, pattern):
            continue
        if name not in STYLES:
            raise unknown_name("tensor-parallel style", name, STYLES)
        style = STYLES[name]
        if style.kind is not None and not isinstance(module, style.kind):
            kind = type(module).__name__
            raise ValueError(f"{path} is a {kind}, and style {name!r} is for nn.{style.kind.__name__}; change the plan")
        return style
    return None


def check_plan(model: nn.Module, plan: Mapping[str, str], tp: int) -> None:
    """``ValueError`` unless every parameter has a style, every pattern a module, and ``tp`` divides what it splits."""
    # What this model leaves out (None), as a head that is tied to the embedding, counts as there.
    modules = list(model.named_modules())
    absent = [f"{path}.{name}".lstrip(".") for path, m in modules for name, value in vars(m).items() if value is None]
    paths = [*(path for path, _ in modules), *absent]
    for pattern in plan:
        if not any(_matches(path, pattern) for path in paths):
            raise ValueError(f"the tensor-parallel plan names {pattern!r}, which matches no module; remove it")
    for path, module in model.named_modules():
        style = style_of(path, module, plan)
        for name, param in module._parameters.items():
            if param is None:
                continue
            full = f"{path}.{name}" if path else name
            if style is None:
                raise ValueError(f"the tensor-parallel plan has no style for {full}; add one of {', '.join(STYLES)}")
            dim = style.split.get(name)
            if dim is not None and param.shape[dim] % tp:
                fits = [n for n in range(1, tp) if param.shape[dim] % n == 0]
                raise ValueError(
                    f"tp={tp} does not divide dimension {dim} of {full}, {param.shape[dim]}; try tp={fits[-1]}"
                )
