"""What a GPU reaches of its published figures: the shares that `stepgraph.costs` forecasts with.

``torchrun --nproc-per-node N benchmarks/roofline.py OUT.json``: matrix products and attention of Llama 3 8B, a copy,
and NCCL's collectives over the N GPUs of one machine. Each is repeated for a second, so that the clock
settles under load.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

TOKENS, SECONDS = 8192, 1.0


def seconds(function) -> float:
    """Seconds a call, over about ``SECONDS`` of calls."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    calls = torch.tensor(max(3, int(SECONDS / (time.perf_counter() - start))), device="cuda")
    dist.broadcast(calls, 0)
    calls = int(calls)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def products():
    """TFLOP/s of matrix products (M, K) x (K, N), bf16, of the projections and their weight gradients."""
    for m, k, n in [(TOKENS, 4096, 4096), (TOKENS, 4096, 14336), (TOKENS, 14336, 4096), (4096, TOKENS, 14336)]:
        a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
        yield f"mm {m}x{k}x{n}", 2 * m * k * n / seconds(lambda a=a, b=b: a @ b) / 1e12


def attention():
    """TFLOP/s of causal attention, 32 heads of 128, half of the scores counted."""
    q, k, v = (torch.randn(1, 32, TOKENS, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    product = 2 * 32 * TOKENS * TOKENS * 128 / 2
    with torch.no_grad():
        forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    yield "attention forward", 2 * product / forward / 1e12
    yield "attention backward", 5 * product / backward / 1e12


def copies():
    """TB/s of a copy of 1 GiB, read and written."""
    a = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    yield "copy", 2 * a.nbytes / seconds(lambda: b.copy_(a)) / 1e12


def collectives():
    """Microseconds of collectives over all ranks, by bytes of the whole tensor."""
    world = dist.get_world_size()
    for size in (2**14, 2**20, 2**25, 2**28, 2**30):
        whole = torch.empty(size // 2, device="cuda", dtype=torch.bfloat16)
        part = torch.empty(size // 2 // world, device="cuda", dtype=torch.bfloat16)
        for name, call in {
            "all_gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),
            "reduce_scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),
            "all_reduce": lambda w=whole: dist.all_reduce(w),
        }.items():
            yield f"{name} {size}", 1e6 * seconds(call)


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    record = {
        "gpu": torch.cuda.get_device_name(),
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "tflops": dict([*products(), *attention()]),
        "tb_per_s": dict(copies()),
        "collective_us": dict(collectives()) if dist.get_world_size() > 1 else {},
    }
    if dist.get_rank() == 0:
        text = json.dumps(record, indent=1)
        print(text)
        Path(sys.argv[1]).write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
