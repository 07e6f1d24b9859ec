"""Small programs of all kinds of operators, many in one captured step, and their comparison with eager, bit for bit.

A program is a chain of lines ``(name, k, way)``: an operator of `OPERATORS` with a small number, and how it is called:
plainly, under autocast, under ``torch.utils.checkpoint`` of either flavour, or twice. Each works on a (4, 6) value.
"""

import copy
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph

Tensor = torch.Tensor
Line = tuple[str, int, str]
WAYS = ("plain", "plain", "autocast", "checkpoint", "reentrant", "twice", "autocast checkpoint", "checkpoint twice")
_ROWS = torch.tensor([2, 0, 3, 0])
_COLUMNS = torch.tensor([[1, 0, 5, 2, 4, 3]] * 4)


def _written(h: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """``h`` after ``write``, which works in place."""
    h = h * 1
    write(h)
    return h.sin()


def _count(m: nn.Module, h: Tensor) -> Tensor:
    m.count += 1
    return h * m.count.to(h.dtype).cos()


def _average(m: nn.Module, h: Tensor) -> Tensor:
    m.average.mul_(0.9).add_(h.detach().float().mean(0), alpha=0.1)
    return h - m.average


def _replace(m: nn.Module, h: Tensor) -> Tensor:
    m.average = m.average * 0.9 + 0.1 * h.detach().float().mean(0)
    return h * m.average.cos()


def _square(h: Tensor) -> Tensor:
    """A well-conditioned matrix."""
    return h.float() @ h.float().mT + 3 * torch.eye(4)


def _images(h: Tensor) -> Tensor:
    return h.view(1, 2, 3, 4)


INDEXED = {
    "index_put": lambda m, h, k: h.index_put((_ROWS[: k + 1],), h[: k + 1] * 0.5, accumulate=k % 2 == 1),
    "index": lambda m, h, k: h[_ROWS, 1 + k :],
    "scatter": lambda m, h, k: h.scatter(1, _COLUMNS[:, : k + 2], h.cos()),
    "scatter_add": lambda m, h, k: h.scatter_add(k % 2, _COLUMNS % 4, h * 2),
    "scatter_reduce": lambda m, h, k: h.scatter_reduce(1, _COLUMNS // 2, h.sin(), ["amax", "mean", "sum", "prod"][k]),
    "gather": lambda m, h, k: h.gather(1, _COLUMNS[:, k:]),
    "index_add": lambda m, h, k: h.index_add(0, _ROWS, h.cos(), alpha=0.5 + k),
    "index_copy": lambda m, h, k: h.index_copy(0, _ROWS[:2], h[k % 3 : k % 3 + 2] * 2),
    "index_fill": lambda m, h, k: h.index_fill(1, _ROWS, 0.5 * k),
    "embedding": lambda m, h, k: F.embedding(_ROWS.view(2, 2), h, padding_idx=0 if k == 0 else None),
    "embedding_max_norm": lambda m, h, k: h * F.embedding(_ROWS, m.table, max_norm=1.0).sum(),
    "embedding_bag": lambda m, h, k: F.embedding_bag(_ROWS.view(2, 2), h, mode=["sum", "mean", "max", "sum"][k]),
    "sort": lambda m, h, k: h.sort(k % 2, descending=k > 1)[0] * torch.arange(6.0),
    "topk": lambda m, h, k: h.topk(2 + k % 2, 1)[0],
    "kthvalue": lambda m, h, k: h.kthvalue(1 + k, 1)[0] + h.median(0)[0][:4],
    "masked_fill": lambda m, h, k: h.masked_fill(k < _COLUMNS, m.scale.sum()),
    "cross_entropy": lambda m, h, k: F.cross_entropy(h, _ROWS, ignore_index=k, label_smoothing=0.1 * (k % 2)),
    "roll": lambda m, h, k: h.roll(k, 1).flip(0).tril(k - 1),
}
REDUCED = {
    "cumsum": lambda m, h, k: h.cumsum(k % 2),
    "cumprod": lambda m, h, k: h.cumprod(k % 2),
    "logcumsumexp": lambda m, h, k: h.logcumsumexp(k % 2),
    "cummax": lambda m, h, k: h.cummax(k % 2)[0],
    "prod": lambda m, h, k: (h * (k != _COLUMNS)).prod(k % 2) if k < 2 else h.prod(),
    "logsumexp": lambda m, h, k: h.logsumexp(k % 2),
    "softmax": lambda m, h, k: h.softmax(k % 2) if k < 2 else h.log_softmax(k % 2),
    "norm": lambda m, h, k: h.norm(p=[2, 1, 3, float("inf")][k], dim=1),
    "var": lambda m, h, k: h.var(k % 2) if k < 2 else h.std(k % 2),
    "quantile": lambda m, h, k: h.float().quantile(0.3 * k, dim=1),
    "amax": lambda m, h, k: h.amax(k % 2) - h.amin(),
    "layer_norm": lambda m, h, k: F.layer_norm(h, (6,), m.scale if k % 2 else None),
    "rms_norm": lambda m, h, k: F.rms_norm(h, (6,), m.scale if k % 2 else None),
    "group_norm": lambda m, h, k: F.group_norm(_images(h), 1 + k % 2),
    "cosine": lambda m, h, k: F.cosine_similarity(h, h.flip(0), k % 2),
    "cdist": lambda m, h, k: torch.cdist(h, h.flip(1), p=[2.0, 1.0, 2.0, 3.0][k]),
}
PRODUCTS = {
    "linear": lambda m, h, k: F.linear(h, m.square, m.scale if k % 2 else None),
    "bilinear": lambda m, h, k: F.bilinear(h, h.cos(), m.cube),
    "einsum": lambda m, h, k: torch.einsum(["ij,kj->ik", "ij,ij->i", "ij,lj->jil", "ij,kl->ij"][k], h, h.cos()),
    "einsum_of_three": lambda m, h, k: torch.einsum("ij,jk,lk->il", h, m.square, h),
    "addmm": lambda m, h, k: torch.addmm(h, h, m.square, beta=0.5, alpha=1.0 + k),
    "baddbmm": lambda m, h, k: torch.baddbmm(h[None], h[None], m.square[None], alpha=0.5),
    "tensordot": lambda m, h, k: torch.tensordot(h, h, dims=2 if k % 2 else 1) if k % 2 else torch.kron(h, m.scale),
    "attention": lambda m, h, k: F.scaled_dot_product_attention(h[None], h[None].cos(), h[None], is_causal=k % 2 == 1),
    "conv1d": lambda m, h, k: F.conv1d(h.view(1, 4, 6), m.kernel[:, :4], padding=k % 2, dilation=1 + k // 2),
    "conv2d": lambda m, h, k: F.conv2d(_images(h), m.kernel[:2, :2, None], padding=(0, k % 2)),
    "conv_transpose": lambda m, h, k: F.conv_transpose1d(h.view(1, 4, 6), m.kernel[:, :2], stride=1 + k % 2),
    "inverse": lambda m, h, k: torch.linalg.inv(_square(h)) if k % 2 else torch.linalg.solve(_square(h), h.float()),
    "cholesky": lambda m, h, k: torch.linalg.cholesky(_square(h)).diagonal().log(),
    "matrix_exp": lambda m, h, k: torch.linalg.matrix_exp(_square(h) * 0.1),
    "logdet": lambda m, h, k: torch.logdet(_square(h)),
    "values": lambda m, h, k: torch.linalg.svdvals(h.float())[k] + torch.linalg.eigvalsh(_square(h.detach()))[k],
}
WINDOWS = {
    "unfold": lambda m, h, k: h.unfold(1, 2 + k % 2, 1 + k // 2),
    "im2col": lambda m, h, k: F.unfold(_images(h), 2, padding=k % 2),
    "fold": lambda m, h, k: F.fold(h.view(1, 4, 6), (3, 4), 2),
    "avg_pool": lambda m, h, k: F.avg_pool2d(_images(h), 2, 1, padding=k % 2),
    "max_pool": lambda m, h, k: F.max_pool2d(_images(h), 2, 1, padding=k % 2),
    "adaptive_pool": lambda m, h, k: F.adaptive_avg_pool2d(_images(h), 2) + F.adaptive_max_pool2d(_images(h), 1),
    "interpolate": lambda m, h, k: F.interpolate(_images(h), 5, mode=["nearest", "bilinear", "bicubic", "area"][k]),
    "grid_sample": lambda m, h, k: F.grid_sample(_images(h), h.view(1, 3, 4, 2).tanh(), align_corners=k % 2 == 1),
    "affine_grid": lambda m, h, k: F.affine_grid(h.view(4, 2, 3).contiguous(), (4, 1, 2, 2), align_corners=k % 2 == 1),
    "pad": lambda m, h, k: F.pad(h[None], (1, 2), mode=["constant", "reflect", "replicate", "circular"][k]),
    "pixel_shuffle": lambda m, h, k: F.pixel_shuffle(h.view(1, 4, 2, 3), 2),
}
COMPLEX = {
    "complex": lambda m, h, k: (torch.complex(h.float(), h.float().cos()) * (1j if k % 2 else 1 + 0.5j)).abs(),
    "fft": lambda m, h, k: torch.fft.irfft(torch.fft.rfft(h.float()) * m.scale[:4], n=6),
    "polar": lambda m, h, k: torch.view_as_real(torch.polar(h.float().abs(), h.float()).conj() * (2 - 1j)),
    "angle": lambda m, h, k: torch.complex(h.float(), h.float() + 1).angle() + torch.sgn(h.float() * 1.0),
}
WRITES = {
    "chain": lambda m, h, k: _written(h, lambda y: y.mul_(2).add_(m.scale, alpha=0.5).tanh_().clamp_(-0.5 - k)),
    "rows": lambda m, h, k: _written(h, lambda y: y[k].add_(y[(k + 1) % 4].detach())),
    "columns": lambda m, h, k: _written(h, lambda y: y[:, k::2].copy_(y[:, k::2].cos())),
    "diagonal": lambda m, h, k: _written(h, lambda y: y.diagonal(k - 1).zero_()),
    "put": lambda m, h, k: _written(h, lambda y: y.index_put_((_ROWS,), h.cos(), accumulate=k % 2 == 0)),
    "addcmul": lambda m, h, k: _written(h, lambda y: y.addcmul_(h, m.scale, value=0.3 + k).addcdiv_(h, h.exp())),
    "relu": lambda m, h, k: _written(h, lambda y: y.relu_() if k % 2 else F.leaky_relu_(y, 0.1)),
    "count": lambda m, h, k: _count(m, h),
    "average": lambda m, h, k: _average(m, h),
    "replace": lambda m, h, k: _replace(m, h),
    "batch_norm": lambda m, h, k: m.norm(h.float()),
}
DRAWN = {
    "dropout": lambda m, h, k: F.dropout(h, 0.2 + 0.2 * k),
    "rand_like": lambda m, h, k: h * torch.rand_like(h) + torch.randn(6),
    "random": lambda m, h, k: h + torch.empty(4, 6).random_(k, 9),
    "uniform": lambda m, h, k: h * torch.empty(4, 6).uniform_(-1, 1) + torch.randint(0, 4, (6,)),
}
OPERATORS: dict[str, Callable] = INDEXED | REDUCED | PRODUCTS | WINDOWS | COMPLEX | WRITES | DRAWN


class Program(nn.Module):
    """Runs ``lines``; the result is a scalar."""

    def __init__(self, lines: Sequence[Line]):
        super().__init__()
        self.lines = list(lines)
        values = torch.Generator().manual_seed(len(lines))
        shapes = {"w": (4, 6), "scale": (6,), "square": (6, 6), "cube": (6, 6, 6), "kernel": (4, 6, 2)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=values) * 0.5))
        self.register_buffer("table", torch.randn(4, 6, generator=values) * 2)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("average", torch.zeros(6))
        if any(line[0] == "batch_norm" for line in lines):
            self.norm = nn.BatchNorm1d(6)

    def run_line(self, line: Line, h: Tensor) -> Tensor:
        name, k, way = line

        def call(h: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in way):
                made = OPERATORS[name](self, h, k).to(h.dtype)
            return made if made.shape == h.shape else h * made.mean()

        for _ in range(1 + ("twice" in way)):
            if "checkpoint" in way or "reentrant" in way:
                h = checkpoint(call, h, use_reentrant="reentrant" in way)
            else:
                h = call(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.w
        for line in self.lines:
            h = self.run_line(line, h)
        return (h * torch.linspace(0.3, 1.1, 24).view(4, 6)).sum()


class Pack(nn.Module):
    """The sum of many programs' results, so that one capture serves all of them."""

    def __init__(self, programs: Sequence[Sequence[Line]]):
        super().__init__()
        self.programs = nn.ModuleList(map(Program, programs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([program(x) for program in self.programs]).sum()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"])


def batch(seed: int = 0, rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))}


def drawn(seed: int, count: int, length: int = 3) -> list[list[Line]]:
    """``count`` programs that eager takes."""
    draw, names, found = random.Random(seed), list(OPERATORS), []
    while len(found) < count:
        lines = [(draw.choice(names), draw.randrange(4), draw.choice(WAYS)) for _ in range(draw.randint(1, length))]
        if _is_valid(lines):
            found.append(lines)
    return found


def packs(programs: Sequence[list[Line]], size: int) -> list[list[list[Line]]]:
    """``programs`` in groups, each for one capture: programs whose checkpoints run twice, which costs a second trace,
    apart from the others."""
    groups: list[list[list[Line]]] = [[], []]
    for lines in programs:
        groups[any(_writes(name) and ("checkpoint" in way or "reentrant" in way) for name, _, way in lines)].append(
            lines
        )
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]


def _writes(name: str) -> bool:
    return name in WRITES or name == "embedding_max_norm"


def _is_valid(lines: Sequence[Line]) -> bool:
    if any(name == "values" and "reentrant" in way for name, _, way in lines):  # refused
        return False
    program = Program(lines)
    try:
        loss = program(batch()["x"])
        loss.backward()
    except (RuntimeError, IndexError, ValueError):
        return False
    return bool(loss.isfinite())


def state(model: nn.Module) -> dict[str, Tensor | None]:
    """Everything that a step leaves in ``model``."""
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return {name: t.detach() for name, t in model.state_dict(keep_vars=True).items()} | grads


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (a, b)))


def compare(programs: Sequence[Sequence[Line]], steps: int = 2) -> int:
    """Raise ``AssertionError`` with the programs that differ from eager in any bit. How many were refused, as those
    whose gradients a re-entrant checkpoint adds up in another order."""
    eager = Pack(programs)
    model = copy.deepcopy(eager)
    try:
        step = stepgraph.capture(model, loss_fn, batch(), passes="exact")
    except stepgraph.CaptureError as error:
        if "in another order" not in str(error):
            raise
        half = len(programs) // 2
        return compare(programs[:half], steps) + compare(programs[half:], steps) if half else 1
    for i in range(steps):
        eager.zero_grad()
        model.zero_grad()
        torch.manual_seed(i)
        loss = loss_fn(eager, batch(i))
        loss.backward()
        numbers = torch.get_rng_state()
        torch.manual_seed(i)
        captured = step(batch(i))
        assert torch.equal(numbers, torch.get_rng_state()), "they draw other numbers"
        expected, actual = state(eager), state(model)
        wrong = {name.split(".")[1] for name in expected if not same_bits(expected[name], actual[name])}
        assert not wrong and same_bits(loss, captured), [programs[int(n)] for n in wrong] or "the loss"
    return 0
