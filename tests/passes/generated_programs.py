"""Programs of views, splits, writes and casts that a generator writes, and their comparison with eager, bit for bit.

A program is a list of lines ``(name, i, j, k, m)``: an operator of `OPERATORS`, the values that it takes, and two small
numbers that it reads as a dimension, a size or a place, whatever the value's shape allows. Lines that eager refuses are
left out, and so are programs whose backward it refuses.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

import stepgraph
from stepgraph.passes import configured

Line = tuple[str, int, int, int, int]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
LARGEST = 256  # elements of a value


def _dim(x: torch.Tensor, k: int) -> int:
    return k % max(x.ndim, 1)


def _size(x: torch.Tensor, k: int) -> int:
    return x.shape[_dim(x, k)]


def _split_sizes(n: int, m: int) -> list[int]:
    first = m % (n + 1)
    return [first, n - first]


def _factors(n: int, m: int) -> list[int]:
    """``n`` as a shape of two or three dimensions."""
    divisors = [d for d in range(1, n + 1) if n % d == 0] or [1]
    first = divisors[m % len(divisors)]
    rest = n // first
    return [first, rest] if m % 2 else [rest, 1, first]


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def _matching(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``b``, or a part of ``a`` itself where shapes do not go together."""
    return b if _broadcasts(a, b) else a.select(0, 0) if a.ndim else a


# What makes new values: (a, b, k, m) -> a tensor or several. Views first.

SPLITS: dict[str, Callable] = {
    "chunk": lambda a, b, k, m: a.chunk(m % 3 + 1, _dim(a, k)),
    "split": lambda a, b, k, m: a.split(m % 4 + 1, _dim(a, k)),
    "split_sizes": lambda a, b, k, m: a.split(_split_sizes(_size(a, k), m), _dim(a, k)),
    "unbind": lambda a, b, k, m: a.unbind(_dim(a, k)),
    "tensor_split": lambda a, b, k, m: a.tensor_split(m % 3 + 1, _dim(a, k)),
    "unsafe_chunk": lambda a, b, k, m: a.unsafe_chunk(m % 3 + 1, _dim(a, k)),
}
STRIDED = {
    "narrow": lambda a, b, k, m: a.narrow(_dim(a, k), m % _size(a, k), 1 + (_size(a, k) - m % _size(a, k)) // 2),
    "select": lambda a, b, k, m: a.select(_dim(a, k), m % _size(a, k)),
    "slice": lambda a, b, k, m: a[(slice(None),) * _dim(a, k) + (slice(m % 3, None, m % 2 + 1),)],
    "ellipsis": lambda a, b, k, m: a[..., m % a.shape[-1] :],
    "unfold": lambda a, b, k, m: a.unfold(_dim(a, k), min(2, _size(a, k)), m % 2 + 1),
    "diagonal": lambda a, b, k, m: a.diagonal(m % 3 - 1, 0, 1 + k % (a.ndim - 1)),
    "expand": lambda a, b, k, m: a.unsqueeze(_dim(a, k)).expand(*a.shape[: _dim(a, k)], 2, *a.shape[_dim(a, k) :]),
    "expand_same": lambda a, b, k, m: a.expand(a.shape),
    "as_strided": lambda a, b, k, m: a.as_strided([2, 2], [m % 3, 1]),
    "as_strided_same": lambda a, b, k, m: a.as_strided(a.shape, a.stride()),
}
RESHAPES = {
    "permute": lambda a, b, k, m: a.permute(*range(k % a.ndim, a.ndim), *range(k % a.ndim)),
    "transpose": lambda a, b, k, m: a.transpose(_dim(a, k), _dim(a, m)),
    "mT": lambda a, b, k, m: a.mT,
    "view": lambda a, b, k, m: a.view(_factors(a.numel(), m)),
    "view_same": lambda a, b, k, m: a.view(a.shape),
    "reshape": lambda a, b, k, m: a.reshape(_factors(a.numel(), m)),
    "flatten": lambda a, b, k, m: a.flatten(_dim(a, k)),
    "unflatten": lambda a, b, k, m: a.unflatten(_dim(a, k), _factors(_size(a, k), m)),
    "unsqueeze": lambda a, b, k, m: a.unsqueeze(_dim(a, k)),
    "squeeze": lambda a, b, k, m: a.squeeze(_dim(a, k)) if m % 2 else a.squeeze(),
    "there_and_back": lambda a, b, k, m: a.transpose(0, _dim(a, k)).transpose(0, _dim(a, k)),
    "detach": lambda a, b, k, m: a.detach(),
    "contiguous": lambda a, b, k, m: a.contiguous(),
}
CASTS = {
    "cast": lambda a, b, k, m: a.to(DTYPES[m % 4]),
    "round_trip": lambda a, b, k, m: a.to(DTYPES[m % 4]).to(a.dtype),
    "copy": lambda a, b, k, m: a.to(a.dtype, copy=True),
    "type_as": lambda a, b, k, m: a.type_as(b),
    "clone": lambda a, b, k, m: a.clone(),
}
MATHS = {
    "add": lambda a, b, k, m: a + _matching(a, b),
    "sub": lambda a, b, k, m: a - _matching(a, b) * 0.5,
    "mul": lambda a, b, k, m: a * _matching(a, b),
    "scale": lambda a, b, k, m: a * (0.5 + m),
    "sin": lambda a, b, k, m: a.sin(),
    "tanh": lambda a, b, k, m: a.tanh(),
    "sum": lambda a, b, k, m: a.sum(_dim(a, k), keepdim=m % 2 == 1),
    "mean": lambda a, b, k, m: a.mean(_dim(a, k)),
    "amax": lambda a, b, k, m: a.amax(_dim(a, k), keepdim=m % 2 == 1),
    "cumsum": lambda a, b, k, m: a.cumsum(_dim(a, k)),
    "softmax": lambda a, b, k, m: a.softmax(_dim(a, k)),
    "cat": lambda a, b, k, m: torch.cat([a, b] if a.shape == b.shape else [a, a], _dim(a, k)),
    "stack": lambda a, b, k, m: torch.stack([a, b] if a.shape == b.shape else [a, a], _dim(a, k)),
    "swap_halves": lambda a, b, k, m: torch.cat(a.chunk(2, _dim(a, k))[::-1], _dim(a, k)),
    "flip": lambda a, b, k, m: a.flip(_dim(a, k)),
}


def _write_part(a: torch.Tensor, k: int, m: int) -> None:
    a.select(_dim(a, k), m % _size(a, k)).fill_(0.25 * m)


def _write_slice(a: torch.Tensor, b: torch.Tensor, k: int, m: int) -> None:
    part = a.transpose(0, _dim(a, k))[m % 2 :: 2]
    part.copy_(b if b.shape == part.shape else part.sin())


#: What writes into the first value: no new value.
WRITES = {
    "mul_": lambda a, b, k, m: a.mul_(0.5 + m),
    "add_": lambda a, b, k, m: a.add_(_matching(a, b).clone()),
    "copy_": lambda a, b, k, m: a.copy_(_matching(a, b).clone()),
    "sin_": lambda a, b, k, m: a.sin_(),
    "write_part": lambda a, b, k, m: _write_part(a, k, m),
    "write_slice": _write_slice,
    "write_chunk": lambda a, b, k, m: a.chunk(2, _dim(a, k))[m % 2].sub_(1),
    "write_split_of_split": lambda a, b, k, m: a.chunk(2, 0)[0].chunk(2, -1)[m % 2].mul_(2),
    "write_diagonal": lambda a, b, k, m: a.diagonal(0, 0, 1).zero_(),
    "write_unbound": lambda a, b, k, m: a.unbind(0)[m % _size(a, 0)].copy_(a[0].clone()),
    "masked_fill_": lambda a, b, k, m: a.masked_fill_(a > 0.5, 0.125 * m),
    "index_put_": lambda a, b, k, m: a.index_put_((torch.tensor([m % _size(a, 0)]),), torch.full((), 0.5 + k).to(a)),
}
#: What changes the shape of the first value itself.
RESHAPED_IN_PLACE = {
    "unsqueeze_": lambda a, b, k, m: a.unsqueeze_(_dim(a, k)),
    "squeeze_": lambda a, b, k, m: a.squeeze_(),
    "transpose_": lambda a, b, k, m: a.transpose_(_dim(a, k), _dim(a, m)),
}
NO_VALUE = {*WRITES, *RESHAPED_IN_PLACE}
OPERATORS: dict[str, Callable] = SPLITS | STRIDED | RESHAPES | CASTS | MATHS | WRITES | RESHAPED_IN_PLACE


class Program(nn.Module):
    """Runs ``lines``. Values at the start hang on parameters, on the batch, on a buffer, or are these themselves."""

    def __init__(self, lines: Sequence[Line]):
        super().__init__()
        self.lines = list(lines)
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 48).view(2, 4, 6))
        self.p = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.bfloat16).view(4, 6))
        self.register_buffer("state", torch.linspace(-1, 1, 24).view(4, 6))
        self.register_buffer("seen", torch.linspace(-2, 1, 48).view(2, 4, 6))

    def run_line(self, line: Line, values: list[torch.Tensor]) -> None:
        name, i, j, k, m = line
        # Counted from the last one: programs then make long chains of values.
        a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
        if name in WRITES and not a.requires_grad:
            b = b.detach()  # else a buffer would carry this step's backward into the next
        if name in RESHAPED_IN_PLACE and a.requires_grad:
            values.append(a := a * 1)  # torch itself cannot trace the backward of earlier views of ``a``
        elif name in RESHAPED_IN_PLACE and any(a is kept for kept in values[:5]):
            values.append(a := a[:])  # a step keeps the shape of its state and its batch
        made = OPERATORS[name](a, b, k, m)
        if name not in NO_VALUE:
            made = made[:2] if isinstance(made, (list, tuple)) else [made]
            values += [v for v in made if 0 < v.numel() <= LARGEST]

    def forward(self, x: torch.Tensor, try_line: Callable | None = None) -> torch.Tensor:
        values = [self.w, self.p, self.seen, self.state, x, x * self.w, torch.sin(x)]
        for line in self.lines:
            (try_line or self.run_line)(line, values)
        total = self.w.square().sum() + self.p.float().sum()
        return total + sum((v.float() * (0.1 + 0.01 * n)).sin().sum() for n, v in enumerate(values))


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-2, 2, 48).view(2, 4, 6)}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"])


def valid(lines: Sequence[Line]) -> list[Line] | None:
    """The lines that eager takes; None where it refuses the backward."""
    model, kept = Program(lines), []

    def try_line(line: Line, values: list[torch.Tensor]) -> None:
        try:
            model.run_line(line, values)
            kept.append(line)
        except (RuntimeError, IndexError, ZeroDivisionError, ValueError):
            return

    try:
        model(_batch()["x"], try_line).backward()
    except RuntimeError:
        return None
    return kept


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = (t.detach().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def _record(model: nn.Module, batch: dict[str, torch.Tensor], loss: torch.Tensor) -> dict[str, torch.Tensor]:
    record = {"loss": loss, "batch": batch["x"], **dict(model.named_buffers()), **dict(model.named_parameters())}
    return {**record, **{f"grad of {n}": p.grad for n, p in model.named_parameters()}}


def compare(lines: Sequence[Line], *, optimizer: bool, memory: str = "none", steps: int = 2) -> None:
    """Raise ``AssertionError`` if a captured step's loss, gradients or parameters, buffers or batch differ from eager's
    in any bit. ``lines``: as `valid` gives them."""
    eager = Program(lines)
    model, batches = copy.deepcopy(eager), (_batch(), _batch())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) if optimizer else None for m in (eager, model)]
    step = stepgraph.capture(model, _loss, batches[1], optimizers[1], passes=configured("exact", memory=memory))
    for i in range(steps):
        loss = _loss(eager, batches[0])
        loss.backward()
        if optimizer:
            optimizers[0].step()
            optimizers[0].zero_grad()
        expected = _record(eager, batches[0], loss)
        actual = _record(model, batches[1], step(batches[1]))
        for name, value in expected.items():
            assert _same_bits(value, actual[name]), f"step {i}: {name} differs from eager"
