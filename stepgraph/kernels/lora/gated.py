"""A gated layer between linear layers with adapters: SwiGLU that adds the adapters' products as it reads, and
its backward with every gradient of the adapters that reads the large matrices.

    G = gate + s_g t_g B_g^T,  U = up + s_u t_u B_u^T,  h = silu(G) U          t = h A^T
    D = dh + dt A,  dU = D silu(G),  dG = D U silu'(G)
    dt_g = s_g dG B_g,  dt_u = s_u dU B_u,  dB_g = s_g dG^T t_g,  dB_u = s_u dU^T t_u,  dA = dt^T h

gate, up and dh are products with frozen weights, A is the adapter of the layer that reads h. As separate
products the adapters read and write matrices of h's size nine times in forward and backward. The fused kernels add no
such traffic, and backward recomputes h instead of keeping it.
"""

import torch

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor
#: The largest rank of adapters that the kernels take.
LARGEST_RANK = 32
#: The kernels take: rows, columns, columns of a program, and warps of forward; rows, columns, rows of a program, loads
#: under way and warps of backward.
FORWARD = (64, 64, 512, 4)
BACKWARD = (64, 64, 1024, 2, 4)


def backward_workspace(gate: Tensor, b_gate: Tensor) -> int:
    """Bytes that `gated_adapters_backward` allocates on a GPU besides its results: parts of sums."""
    (M, N), r = gate.shape, b_gate.shape[1]
    _, wide, rows, *_ = BACKWARD
    return -(-N // wide) * 2 * M * r * gate.element_size() + -(-M // rows) * 3 * N * r * 4


def _whole(base: Tensor, t: Tensor, b: Tensor, scale: float) -> Tensor:
    return base.float() + scale * (t.float() @ b.float().t())


@operator(
    lambda gate, up, t_gate, t_up, b_gate, b_up, a, *_: (
        gate.new_empty(gate.shape), gate.new_empty(gate.shape[0], len(a))
    ),
    launch="lora.gated_triton:launch",
)  # fmt: skip
def gated_adapters(
    gate: Tensor, up: Tensor, t_gate: Tensor, t_up: Tensor, b_gate: Tensor, b_up: Tensor, a: Tensor,
    scale_gate: float, scale_up: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """SwiGLU of two linear layers with adapters: h (M, N), and h A^T (M, r), contiguous. Sums are in fp32.

    gate, up: (M, N), contiguous, the products of the frozen weights; all tensors in one 16-bit dtype on a GPU. t_gate,
    t_up: (M, r), rows of contiguous elements: x A^T of their adapters. b_gate, b_up: (N, r), contiguous. a: (r, N),
    contiguous, the adapter of the layer that reads h. All ranks are equal, at most `LARGEST_RANK`. scale_gate,
    scale_up: of the adapters of gate and up.
    """
    h = torch.nn.functional.silu(_whole(gate, t_gate, b_gate, scale_gate)) * _whole(up, t_up, b_up, scale_up)
    h = h.to(gate.dtype)
    return h, h @ a.t()


def _like_backward(dh: Tensor, gate: Tensor, up: Tensor, t_gate: Tensor, t_up: Tensor, b: Tensor, *_: object) -> tuple:
    M, N, r = *gate.shape, b.shape[1]
    return tuple(gate.new_empty(s) for s in ((M, N), (M, N), (M, r), (M, r), (N, r), (N, r), (r, N)))


@operator(_like_backward, launch="lora.gated_triton:launch_backward")
def gated_adapters_backward(
    dh: Tensor, gate: Tensor, up: Tensor, t_gate: Tensor, t_up: Tensor, b_gate: Tensor, b_up: Tensor, dt: Tensor,
    a: Tensor, scale_gate: float, scale_up: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `gated_adapters`, all contiguous: of gate and up, (M, N); of t_gate and t_up, (M, r); of b_gate and
    b_up, (N, r); and of a, (r, N).

    dh: (M, N), contiguous: the gradient of h through the frozen weight of the layer that reads h. dt: (M, r),
    contiguous: the gradient of h A^T. The others are as in `gated_adapters`.
    """
    G, U = _whole(gate, t_gate, b_gate, scale_gate), _whole(up, t_up, b_up, scale_up)
    D, s = dh.float() + dt.float() @ a.float(), torch.sigmoid(G)
    act = G * s
    d_gate, d_up = (d.to(gate.dtype) for d in (D * U * (s + act * (1 - s)), D * act))
    h = (act * U).to(gate.dtype)
    pairs = ((d_gate, scale_gate), (d_up, scale_up))
    d_ts = [(scale * (d.float() @ b.float())).to(d.dtype) for (d, scale), b in zip(pairs, (b_gate, b_up), strict=True)]
    d_bs = [
        (scale * (d.float().t() @ t.float())).to(d.dtype) for (d, scale), t in zip(pairs, (t_gate, t_up), strict=True)
    ]
    return d_gate, d_up, *d_ts, *d_bs, (dt.float().t() @ h.float()).to(h.dtype)
