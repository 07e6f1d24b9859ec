"""Products with what follows them: cuBLAS and a kernel, next to QuACK's epilogues: ms by graph replay, in bf16.

    python benchmarks/epilogues.py [--json FILE] [MODEL ...]
    PYTHONPATH=. python benchmarks/epilogues.py --gated [--json FILE] [MODEL ...]
    QUACK_ARCH=90 CUTE_DSL_ARCH=sm_90a QUACK_CACHE_DIR=DIR python benchmarks/epilogues.py --compile-only

The second compiles QuACK's kernels into a folder for a GPU that is not there, some 200 in ten minutes.

``forward``: the product into a feed-forward layer with its activation, both results kept for backward. ``backward``:
the gradient that comes back through the second product, times the activation's derivative, and the first bias's
gradient; ``backward, activation``: the activation is computed again too. ``residual``: the second product plus the
residual, and RMS norm of the sum. ``up``, ``down gradient``: the products of forward and backward alone. SwiGLU's first
product makes gates and what they multiply at once; QuACK reads and writes them in pairs: ``interleaved`` has the weight
so in memory, ``quack`` reads the two halves of a weight, as the products of ``input`` and ``weight gradient`` do.

``--gated`` measures stepgraph's operators for gate and up of separate weights (`stepgraph/kernels/gated.py`) in the
tiles of ``GATED_TILES``: the product of up with the gated activation, and the gradients of both; microseconds.
``tuned``: the fastest of cuBLASLt's algorithms (`tune_products`) and the kernel.

``cublas``: torch's product, then one Triton kernel that moves each value once. ``quack``: one kernel of the package
``quack-kernels`` in the tiles of ``TILES`` that were fastest. The providers of a row are measured in turns; a figure is
the median of ``ROUNDS``. ``error``: the largest difference from fp32, relative to the largest value.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # to compile only
    triton = None

Tensor = torch.Tensor

#: Rows, width, width between the two products, activation, biases.
SHAPES = {
    "nanogpt-124m": (32768, 768, 3072, "gelu_erf", False),
    "gpt2-medium": (16384, 1024, 4096, "gelu_tanh_approx", True),
    "bert-large": (16384, 1024, 4096, "gelu_erf", True),
    "vit-l": (25216, 1024, 4096, "gelu_erf", True),
    "dit-l": (32768, 1024, 4096, "gelu_tanh_approx", True),
    "golf": (32768, 768, 3072, "relu_sq", False),
    "llama-1b": (16384, 2048, 8192, "swiglu", False),
    "llama-8b": (8192, 4096, 14336, "swiglu", False),
}

#: For ``--gated``: rows, width, inner width, activation.
GATED = {
    "llama3-1b": (16384, 2048, 8192, "silu"),
    "qwen3-0.6b": (16384, 1024, 3072, "silu"),
    "llama3-8b": (8192, 4096, 14336, "silu"),
    "gemma2-2b": (8192, 2304, 9216, "gelu_tanh"),
}

#: Turns of the FINALISTS, the fastest tiles of two turns, each of CALLS calls in a graph.
ROUNDS, CALLS, FINALISTS = 9, 3, 3

#: Rows, columns, whether two tiles take turns, blocks of a cluster along rows and columns, whether a tile goes to the
#: block that is free.
TILES = {
    "128x192 pingpong": (128, 192, True, 2, 1, False),
    "256x128": (256, 128, False, 2, 1, False),
    "128x256": (128, 256, False, 2, 1, False),
    "256x192": (256, 192, False, 2, 1, False),
    "128x160 pingpong": (128, 160, True, 2, 1, False),
    "128x128 pingpong": (128, 128, True, 2, 1, False),
    "128x192 pingpong, dynamic": (128, 192, True, 2, 1, True),
    "128x256, 1x2": (128, 256, False, 1, 2, False),
    "256x128, dynamic": (256, 128, False, 2, 1, True),
}

#: As `TILES`.
GATED_TILES = {name: TILES[name] for name in ("128x128 pingpong", "128x160 pingpong", "128x192 pingpong")} | {
    "256x128": TILES["256x128"],
    "128x256": TILES["128x256"],
    "128x128 pingpong 1x2": (128, 128, True, 1, 2, False),
}

if triton is not None:

    @triton.jit
    def _gated_kernel(g, u, a, KIND: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x, y = tl.load(g + at).to(tl.float32), tl.load(u + at).to(tl.float32)
        act = x * tl.sigmoid(x) if KIND == "silu" else _act(x, "gelu_tanh_approx")
        tl.store(a + at, (act * y).to(tl.bfloat16))

    @triton.jit
    def _dgated_kernel(da, g, u, dg, du, KIND: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x, y, d = tl.load(g + at).to(tl.float32), tl.load(u + at).to(tl.float32), tl.load(da + at).to(tl.float32)
        if KIND == "silu":
            s = tl.sigmoid(x)
            act, slope = x * s, s * (1 + x * (1 - s))
        else:
            act, slope = _act(x, "gelu_tanh_approx"), _derivative(x, "gelu_tanh_approx")
        tl.store(dg + at, (d * y * slope).to(tl.bfloat16))
        tl.store(du + at, (d * act).to(tl.bfloat16))

    @triton.jit
    def _act(z, KIND: tl.constexpr):
        if KIND == "gelu_erf":
            return z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
        elif KIND == "gelu_tanh_approx":
            return z * tl.sigmoid(1.5957691216057308 * z * (1 + 0.044715 * z * z))
        else:
            return tl.maximum(z, 0.0) * tl.maximum(z, 0.0)

    @triton.jit
    def _derivative(z, KIND: tl.constexpr):
        if KIND == "gelu_erf":
            cdf = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
            return cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
        elif KIND == "gelu_tanh_approx":
            s = tl.sigmoid(1.5957691216057308 * z * (1 + 0.044715 * z * z))
            return s + z * s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * z * z)
        else:
            return 2 * tl.maximum(z, 0.0)

    @triton.jit
    def _act_kernel(z, a, KIND: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(a + at, _act(tl.load(z + at).to(tl.float32), KIND).to(tl.bfloat16))

    @triton.jit
    def _dact_kernel(
        da, z, dz, a, db, M, F, ROWS, KIND: tl.constexpr, AGAIN: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr,
        BN: tl.constexpr,
    ):  # fmt: skip
        cols = tl.program_id(0) * BN + tl.arange(0, BN)
        first = tl.program_id(1) * ROWS
        total = tl.zeros((BN,), tl.float32)
        for start in range(first, min(first + ROWS, M), BM):
            rows = start + tl.arange(0, BM)
            at = rows[:, None].to(tl.int64) * F + cols[None, :]
            mask = (rows < M)[:, None] & (cols < F)[None, :]
            x = tl.load(z + at, mask, 0.0).to(tl.float32)
            g = tl.load(da + at, mask, 0.0).to(tl.float32) * _derivative(x, KIND)
            tl.store(dz + at, g.to(tl.bfloat16), mask)
            if AGAIN:
                tl.store(a + at, _act(x, KIND).to(tl.bfloat16), mask)
            if BIAS:
                total += tl.sum(g, 0)
        if BIAS:
            tl.store(db + tl.program_id(1) * F + cols, total, cols < F)

    @triton.jit
    def _swiglu_kernel(z, h, F, BLOCK: tl.constexpr):
        row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(z + row * 2 * F + cols, cols < F).to(tl.float32)
        u = tl.load(z + row * 2 * F + F + cols, cols < F).to(tl.float32)
        tl.store(h + row * F + cols, (g * tl.sigmoid(g) * u).to(tl.bfloat16), cols < F)

    @triton.jit
    def _dswiglu_kernel(dh, z, dz, h, F, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
        row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < F
        g = tl.load(z + row * 2 * F + cols, mask).to(tl.float32)
        u = tl.load(z + row * 2 * F + F + cols, mask).to(tl.float32)
        d = tl.load(dh + row * F + cols, mask).to(tl.float32)
        s = tl.sigmoid(g)
        tl.store(dz + row * 2 * F + cols, (d * u * s * (1 + g * (1 - s))).to(tl.bfloat16), mask)
        tl.store(dz + row * 2 * F + F + cols, (d * g * s).to(tl.bfloat16), mask)
        if AGAIN:
            tl.store(h + row * F + cols, (g * s * u).to(tl.bfloat16), mask)

    @triton.jit
    def _norm_kernel(y, r, s, n, D, ADD: tl.constexpr, BLOCK: tl.constexpr):
        row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        mask = cols < D
        x = tl.load(y + row * D + cols, mask, 0.0).to(tl.float32)
        if ADD:
            x += tl.load(r + row * D + cols, mask, 0.0).to(tl.float32)
            x = x.to(tl.bfloat16)
            tl.store(s + row * D + cols, x, mask)
            x = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x) / D + 1e-6)
        tl.store(n + row * D + cols, (x * rstd).to(tl.bfloat16), mask)


def act(z: Tensor, kind: str) -> Tensor:
    a = torch.empty_like(z)
    _act_kernel[(z.numel() // 2048,)](z, a, kind, BLOCK=2048, num_warps=4)
    return a


def dact(da: Tensor, z: Tensor, kind: str, again: bool, bias: bool) -> tuple[Tensor, ...]:
    M, F = z.shape
    dz = torch.empty_like(z)
    a = torch.empty_like(z) if again else z
    rows = 64 if bias else 16
    db = torch.empty(-(-M // rows), F, device=z.device) if bias else z
    _dact_kernel[(-(-F // 256), -(-M // rows))](
        da, z, dz, a, db, M, F, rows, kind, again, bias, BM=16, BN=256, num_warps=8
    )
    return (dz, *([a] if again else []), *([db.sum(0)] if bias else []))


def swiglu(z: Tensor) -> Tensor:
    M, F = z.shape[0], z.shape[1] // 2
    h = z.new_empty(M, F)
    _swiglu_kernel[(M, -(-F // 1024))](z, h, F, BLOCK=1024, num_warps=4)
    return h


def dswiglu(dh: Tensor, z: Tensor, again: bool) -> tuple[Tensor, ...]:
    M, F = dh.shape
    dz = torch.empty_like(z)
    h = torch.empty_like(dh) if again else dh
    _dswiglu_kernel[(M, -(-F // 1024))](dh, z, dz, h, F, again, BLOCK=1024, num_warps=4)
    return (dz, h) if again else (dz,)


def gated_rows(name: str) -> list[dict[str, Any]]:
    """A row for each part: microseconds by provider."""
    from stepgraph.kernels import gated, products, quack  # noqa: F401  (defines torch.ops.stepgraph.product)

    M, D, N, kind = GATED[name]
    torch.manual_seed(0)
    x, dy = (randn(M, D, device="cuda") for _ in range(2))
    w_gate, w_up = (randn(N, D, device="cuda", scale=D**-0.5) for _ in range(2))
    down = randn(D, N, device="cuda", scale=N**-0.5)
    g, u, da = x @ w_gate.t(), x @ w_up.t(), dy @ down
    tuned = torch.ops.stepgraph.product

    def act(u: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.empty_like(u)
        _gated_kernel[(u.numel() // 1024,)](g, u, a, kind, BLOCK=1024, num_warps=4)
        return u, a

    def dact(da: Tensor) -> tuple[Tensor, Tensor]:
        dg, du = torch.empty_like(g), torch.empty_like(g)
        _dgated_kernel[(g.numel() // 1024,)](da, g, u, dg, du, kind, BLOCK=1024, num_warps=4)
        return dg, du

    def by_tile(tile: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            quack._tiles = lambda: tiles(tile, True)
            return call()

        return run

    parts: dict[str, dict[str, Callable[[], Any]]] = {
        "one product": {"cublas": lambda: x @ w_up.t(), "tuned": lambda: tuned(x, w_up.t())},
        "gradient alone": {"cublas": lambda: dy @ down, "tuned": lambda: tuned(dy, down)},
        "kernel": {"triton": lambda: act(u)},
        "kernel backward": {"triton": lambda: dact(da)},
        "up and activation": {
            "cublas": lambda: act(x @ w_up.t()),
            "tuned": lambda: act(tuned(x, w_up.t())),
            **{t: by_tile(t, lambda: gated.gated_product(x, w_up.t(), g, kind)) for t in GATED_TILES},
        },
        "backward": {
            "cublas": lambda: dact(dy @ down),
            "tuned": lambda: dact(tuned(dy, down)),
            **{t: by_tile(t, lambda: gated.gated_product_backward(dy, down, g, u, kind)) for t in GATED_TILES},
        },
    }
    rows = []
    for what, calls in parts.items():
        pool = torch.cuda.graph_pool_handle()
        for call in calls.values():  # compiles, and times cuBLASLt's algorithms
            call()
        graphs = {provider: graph_of(call, pool) for provider, call in calls.items()}
        replays(graphs, 2)
        us = {provider: 1e3 * ms for provider, ms in replays(graphs, ROUNDS).items()}
        rows.append({"model": name, "what": what, "us": us})
        print(name, what, {provider: round(t) for provider, t in us.items()}, flush=True)
    return rows


def norm(y: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of both, if there are two, and its RMS norm."""
    M, D = y.shape
    n, s = torch.empty_like(y), torch.empty_like(y) if r is not None else y
    block = 1 << (D - 1).bit_length()
    _norm_kernel[(M,)](y, y if r is None else r, s, n, D, r is not None, BLOCK=block, num_warps=max(1, block // 512))
    return s, n


def quack_epilogues() -> Any:
    """The package's epilogues, by name."""
    from quack.activation import dact_fn_map
    from quack.epilogue import library
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import RowVecLoad, RowVecReduce

    @gemm_epilogue()
    def residual(acc, c):
        return {"D": acc + c}

    @gemm_epilogue(ops={"bias": RowVecLoad("bias")})
    def residual_bias(acc, c, bias):
        return {"D": acc + bias + c}

    def backward(kind: str, again: bool, bias: bool) -> Any:
        derivative = dact_fn_map[kind]
        reduces = {"db": RowVecReduce("db")} if bias else None
        outputs = ("a",) if again else ()

        if again and bias:

            @gemm_epilogue(outputs=outputs, reduces=reduces)
            def epilogue(acc, c):
                dz, a = derivative(c, acc)
                return {"D": dz, "a": a, "db": dz}

        elif again:

            @gemm_epilogue(outputs=outputs)
            def epilogue(acc, c):
                dz, a = derivative(c, acc)
                return {"D": dz, "a": a}

        elif bias:

            @gemm_epilogue(reduces=reduces)
            def epilogue(acc, c):
                dz, _ = derivative(c, acc)
                return {"D": dz, "db": dz}

        else:

            @gemm_epilogue()
            def epilogue(acc, c):
                dz, _ = derivative(c, acc)
                return {"D": dz}

        return epilogue

    def forward(kind: str, bias: bool) -> Any:
        return library.linear_act_mod(
            kind, gated=kind == "swiglu", has_c=False, has_rowvec=bias, has_colvec=False, sr=False, has_alpha=False
        )

    return argparse.Namespace(
        plain=library.identity_epi,
        residual=lambda bias: residual_bias if bias else residual,
        forward=forward,
        backward=backward,
        dswiglu=lambda again: (
            library.dgated_mod("swiglu", has_scale=False, has_reduce=False) if again else library.dswiglu_dpreact_mod
        ),
    )


@functools.cache  # the package takes a configuration that it has seen by its identity
def tiles(name: str, gated: bool = False) -> Any:
    from quack.gemm_config import GemmConfig

    m, n, pingpong, cm, cn, dynamic = (GATED_TILES if gated else TILES)[name]
    return GemmConfig(
        tile_m=m,
        tile_n=n,
        pingpong=pingpong,
        cluster_m=cm,
        cluster_n=cn,
        is_dynamic_persistent=dynamic,
        device_capacity=9,
    )


def randn(*shape: int, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(torch.bfloat16)


class Case:
    """A row of the table: calls of each provider, and the right results of the first ``PROBE`` rows."""

    PROBE = 512

    def __init__(self, what: str, flops: float, right: Callable[[], tuple[Tensor | None, ...]]) -> None:
        self.what, self.flops, self.right = what, flops, right
        self.calls: dict[tuple[str, str], Callable[[], tuple[Tensor, ...]]] = {}  # by provider and tile
        self.order: dict[str, Callable[[Tensor], Tensor]] = {}  # how a provider's first result is brought into order

    def by_cublas(self, call: Callable[[], tuple[Tensor, ...]], provider: str = "cublas + kernel") -> None:
        self.calls[provider, ""] = call

    def by_tiles(self, call: Callable[[Any], tuple[Tensor, ...]], provider: str = "quack") -> None:
        for tile in TILES:
            self.calls[provider, tile] = lambda tile=tile: call(tiles(tile))


def derivative_of(z: Tensor, da: Tensor, kind: str) -> Tensor:
    x = z.float().requires_grad_()
    activation(x, kind).backward(da)
    return x.grad


def activation(x: Tensor, kind: str) -> Tensor:
    f = torch.nn.functional
    if kind == "relu_sq":
        return f.relu(x).square()
    return f.gelu(x, approximate="tanh" if kind == "gelu_tanh_approx" else "none")


def interleaved(z: Tensor) -> Tensor:
    """Gates and what they multiply one after another, from (gates, what they multiply)."""
    return z.unflatten(-1, (2, z.shape[-1] // 2)).mT.flatten(-2)


def apart(z: Tensor) -> Tensor:
    return z.unflatten(-1, (z.shape[-1] // 2, 2)).mT.flatten(-2)


def cases(name: str, device: str, quack: Any) -> Any:
    M, D, F, kind, biased = SHAPES[name]
    if device == "cpu":  # only to compile
        M, D, F = 512, 256, 512
    torch.manual_seed(0)
    gated = kind == "swiglu"
    x, r, dy = (randn(M, D, device=device) for _ in range(3))
    w1 = randn(2 * F if gated else F, D, device=device, scale=D**-0.5)
    w2 = randn(D, F, device=device, scale=F**-0.5)
    b1 = randn(w1.shape[0], device=device) if biased else None
    b2 = randn(D, device=device) if biased else None
    p = slice(0, Case.PROBE)
    up, down = 2 * M * D * w1.shape[0], 2 * M * D * F

    def product(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return a @ w.t() if b is None else torch.addmm(b, a, w.t())

    def fp32(a: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return a[p].float() @ w.float().t() + (0 if b is None else b.float())

    bias1 = {} if b1 is None else {"mRowVecBroadcast": b1}

    case = Case("up", up, lambda: (fp32(x, w1),))
    case.by_cublas(lambda: (x @ w1.t(),), "cublas")
    case.by_tiles(lambda c: (quack.plain(x, w1.t(), config=c)["D"],))
    yield case

    case = Case("down gradient", down, lambda: (fp32(dy, w2.t()),))
    case.by_cublas(lambda: (dy @ w2,), "cublas")
    case.by_tiles(lambda c: (quack.plain(dy, w2, config=c)["D"],))
    yield case

    z = product(x, w1, b1)
    if gated:
        case = Case("forward", up, lambda: gated_right(fp32(x, w1)))

        def gated_right(z: Tensor) -> tuple[Tensor, Tensor]:
            g, u = z.chunk(2, -1)
            return z, torch.nn.functional.silu(g) * u

        def gated_cublas() -> tuple[Tensor, Tensor]:
            z = x @ w1.t()
            return z, swiglu(z)

        mod = quack.forward("swiglu", False)

        def gated_quack(c: Any, concat: bool) -> tuple[Tensor, Tensor]:
            w, kwargs = (w1, {"concat_layout": ("B",)}) if concat else (w1i, {})
            out = mod(x, w.t(), config=c, out={"D": x.new_empty(M, 2 * F), "mAuxOut": x.new_empty(M, F)}, **kwargs)
            return out["D"], out["mAuxOut"]

        w1i = interleaved(w1.t()).t().contiguous()
        case.by_cublas(gated_cublas)
        case.by_tiles(lambda c: gated_quack(c, False), "quack interleaved")
        case.by_tiles(lambda c: gated_quack(c, True), "quack")
        case.order["quack"] = apart
        yield case

        zi = interleaved(z)
        g, u = (t[p].float() for t in z.chunk(2, -1))

        def dgated_right() -> tuple[Tensor, Tensor]:
            d, s = fp32(dy, w2.t()), torch.sigmoid(g)
            return torch.cat([d * u * s * (1 + g * (1 - s)), d * g * s], -1), g * s * u

        for again in (False, True):
            case = Case("backward, activation" if again else "backward", down, dgated_right)
            case.by_cublas(lambda again=again: dswiglu(dy @ w2, z, again))
            mod_d = quack.dswiglu(again)

            def dgated_quack(c: Any, mod: Any = mod_d, again: bool = again) -> tuple[Tensor, ...]:
                out = {"D": x.new_empty(M, 2 * F)} | ({"mAuxOut": x.new_empty(M, F)} if again else {})
                out = mod(dy, w2, zi, config=c, out=out)
                return tuple(out[k] for k in ("D", "mAuxOut") if k in out)

            case.by_tiles(dgated_quack)
            case.order["quack"] = apart
            yield case
        dz = randn(M, 2 * F, device=device)
        dzi = interleaved(dz)
        case = Case("input gradient", up, lambda: (fp32(dz, w1.t()),))
        case.by_cublas(lambda: (dz @ w1,), "cublas")
        case.by_tiles(lambda c: (quack.plain(dzi, w1, config=c, concat_layout=("B",))["D"],))
        yield case
        case = Case("weight gradient", up, lambda: ((dz.t()[p].float() @ x.float()),))
        case.by_cublas(lambda: (dz.t() @ x,), "cublas")
        case.by_tiles(
            lambda c: (
                quack.plain(dzi.t(), x, config=c, out={"D": x.new_empty(2 * F, D)}, concat_layout=("out",))["D"],
            )
        )
        yield case
    else:
        case = Case("forward", up, lambda: (fp32(x, w1, b1), activation(fp32(x, w1, b1), kind)))

        def cublas() -> tuple[Tensor, Tensor]:
            z = product(x, w1, b1)
            return z, act(z, kind)

        mod = quack.forward(kind, biased)

        def by_quack(c: Any) -> tuple[Tensor, Tensor]:
            out = mod(x, w1.t(), config=c, **bias1)
            return out["D"], out["mAuxOut"]

        case.by_cublas(cublas)
        case.by_tiles(by_quack)
        yield case

        for again in (False, True):

            def right(again: bool = again) -> tuple[Tensor | None, ...]:
                dz = derivative_of(z[p], fp32(dy, w2.t()), kind)
                return (dz, *([activation(z[p].float(), kind)] if again else []), *([None] if biased else []))

            case = Case("backward, activation" if again else "backward", down, right)
            case.by_cublas(lambda again=again: dact(dy @ w2, z, kind, again, biased))
            mod_d = quack.backward(kind, again, biased)

            def by_quack_d(c: Any, mod: Any = mod_d) -> tuple[Tensor, ...]:
                out = mod(dy, w2, z, config=c)
                return tuple(out[k] for k in ("D", "a", "db") if k in out)

            case.by_tiles(by_quack_d)
            yield case

    h = randn(M, F, device=device)

    def sum_right() -> tuple[Tensor, Tensor]:
        s = fp32(h, w2, b2) + r[p].float()
        return s, s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6)

    case = Case("residual", down, sum_right)
    case.by_cublas(lambda: norm(product(h, w2, b2), r))
    if not biased:
        case.by_cublas(lambda: norm(torch.addmm(r, h, w2.t()), None), "cublas beta + kernel")
    mod_r = quack.residual(biased)
    bias2 = {} if b2 is None else {"bias": b2}

    def by_quack_r(c: Any) -> tuple[Tensor, ...]:
        y = mod_r(h, w2.t(), r, config=c, **bias2)["D"]
        return norm(y, None) if device == "cuda" else (y,)

    case.by_tiles(by_quack_r)
    yield case


def last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:200] if lines else ''}"


def errors(case: Case, provider: str, results: tuple[Tensor, ...], right: tuple[Tensor | None, ...]) -> float:
    order = case.order.get(provider.split(" ")[0], lambda t: t)
    worst = 0.0
    for i, (got, want) in enumerate(zip(results, right, strict=False)):
        if want is not None:
            got = got[: Case.PROBE].float()
            got = order(got) if i == 0 else got
            worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
    return worst


def graph_of(call: Callable[[], Any], pool: Any) -> torch.cuda.CUDAGraph:
    """Calls whose results lie apart; another graph of the pool may write where they lie."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), pool=pool):
        kept = [call() for _ in range(CALLS)]
    del kept
    return graph


def replays(graphs: dict[Any, torch.cuda.CUDAGraph], rounds: int) -> dict[Any, float]:
    """ms of a call of each, in turns."""
    marks: dict[Any, list[Any]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: median(b.elapsed_time(e) for b, e in found) / CALLS for name, found in marks.items()}


def measured(name: str, case: Case) -> list[dict[str, Any]]:
    """A row for each provider and tile; ``ms`` of the finalists, ``first_ms`` of all."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    right, pool = case.right(), torch.cuda.graph_pool_handle()
    for key, call in case.calls.items():
        row = rows[key] = {"model": name, "what": case.what, "provider": key[0], "tile": key[1]}
        try:
            row["error"] = errors(case, key[0], call(), right)
            if not row["error"] < 0.03:
                raise ValueError(f"error {row['error']:.3g}")
            graphs[key] = graph_of(call, pool)
        except Exception as error:  # another package's code may raise anything
            row["failed"] = last_line(error)
            print(f"{name}, {case.what}, {' '.join(key)}: {row['failed']}", flush=True)
    replays(graphs, 1)
    first = replays(graphs, 2)
    finalists = {}
    for provider in dict.fromkeys(provider for provider, _ in first):
        best = sorted((key for key in first if key[0] == provider), key=lambda key: first[key])
        finalists |= {key: graphs[key] for key in best[:FINALISTS]}
    for key, ms in first.items():
        rows[key]["first_ms"] = ms
    last = replays(finalists, ROUNDS)
    base = min(ms for (provider, _), ms in last.items() if provider.startswith("cublas"))
    for key, ms in sorted(last.items(), key=lambda item: item[1]):
        rows[key] |= {"ms": ms, "tflops": case.flops / ms / 1e9, "speedup": base / ms}
        print(
            f"{name}, {case.what}, {' '.join(key)}: {ms:.4f} ms, {case.flops / ms / 1e9:.0f} TFLOP/s, {base / ms:.3f}x",
            flush=True,
        )
    return list(rows.values())


def compile_only(names: list[str]) -> None:
    """Compiles all kernels on a machine without a GPU; their launches fail."""
    quack = quack_epilogues()
    for name in names:
        for case in cases(name, "cpu", quack):
            for (provider, tile), call in case.calls.items():
                if tile:
                    begin = time.perf_counter()
                    try:
                        call()
                        result = "ran"
                    except Exception as error:
                        result = last_line(error)
                    print(
                        f"{name}, {case.what}, {provider} {tile}: {time.perf_counter() - begin:.1f} s, {result}",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after these")
    options = parser.parse_args()
    start = time.perf_counter()
    models = options.models or list(GATED if options.gated else SHAPES)
    if options.compile_only:
        return compile_only(models)
    from stepgraph.config.environment import environment, package_version

    shapes = GATED if options.gated else SHAPES
    record: dict[str, Any] = {"environment": environment(), "shapes": shapes, "rows": []}
    record["environment"]["versions"] |= {p: package_version(p) for p in ("quack-kernels", "nvidia-cutlass-dsl")}
    if options.gated:
        with torch.cuda.stream(torch.cuda.Stream()):
            record["rows"] = [row for name in models for row in gated_rows(name)]
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
        return
    quack = quack_epilogues()
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.cuda.stream(torch.cuda.Stream()):
        for name in models:
            for case in cases(name, "cuda", quack):
                if time.perf_counter() - start > options.seconds:
                    print("out of time", flush=True)
                    sys.exit()
                try:
                    record["rows"] += measured(name, case)
                except Exception as error:
                    print(f"  {name}, {case.what}: {last_line(error)}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
