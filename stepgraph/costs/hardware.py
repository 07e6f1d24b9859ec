"""GPUs and what joins them: the published figures that a forecast is made of, and the cost of a collective.

Collectives follow an alpha-beta model: a latency by number of ranks and nodes, plus bytes by the slowest link's
bandwidth. They run on rings, an all-reduce also on a tree between nodes, in the cheaper of two NCCL protocols: Simple,
which reaches full bandwidth, and LL, which sends a flag with every four bytes of data and so half the bandwidth, at
lower latency.

Source for the latencies: NCCL 2.27, src/graph/tuning.cc, ``baseLatencies`` and ``hwLatencies``.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: GPUs that NVLink joins: those of one HGX or DGX machine.
GPUS_PER_NODE = 8

#: Share of the peaks, of arithmetic and of memory, that the kernels of whole steps reach. Source: steps measured on an
#: H200 over the forecasts made of peaks alone (benchmarks/h200_golf.json: 48.8 ms to 34.5; h200_llama3-1b.json).
REACHED = 0.72


@dataclass(frozen=True)
class Gpu:
    """One GPU of an eight-GPU machine. ``flops``: peak dense FLOP/s of matrix products by dtype. ``memory``: bytes.
    ``bandwidth``: of memory, bytes/s. ``nvlink``, ``network``: bytes/s of one GPU in one direction."""

    name: str
    flops: dict[torch.dtype, float]
    memory: float
    bandwidth: float
    nvlink: float
    network: float

    def peak(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s of matrix products of ``dtype``, that of fp32 for any other dtype."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _gpu(name: str, bf16: float, fp32: float, memory: float, bandwidth: float, nvlink: float, network: float) -> Gpu:
    flops = {torch.bfloat16: bf16 * 1e12, torch.float16: bf16 * 1e12, torch.float32: fp32 * 1e12}
    return Gpu(name, flops, memory * 1e9, bandwidth * 1e12, nvlink * 1e9, network * 1e9)


#: TFLOP/s without sparsity, GB, TB/s, GB/s in one direction (data sheets give both directions together, and fp32
#: without TF32). The network is one 400 Gb/s adapter a GPU.
GPUS: dict[str, Gpu] = {
    # NVIDIA H100 data sheet, SXM: 1,979 TFLOPS bf16 with sparsity, 67 fp32, 80 GB, 3.35 TB/s, NVLink 900 GB/s;
    # DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s.
    "h100": _gpu("H100 SXM", 989.5, 67, 80, 3.35, 450, 50),
    # NVIDIA H200 data sheet, SXM: the same at 4.8 TB/s; DGX H200 data sheet: 8 ConnectX-7 of 400 Gb/s. Memory as torch
    # counts it, 139.8 GiB: the data sheet's 141 GB are less than what is there.
    "h200": _gpu("H200 SXM", 989.5, 67, 150.1, 4.8, 450, 50),
    # NVIDIA HGX B200 data sheet, per GPU: 4.5 PFLOPS bf16 with sparsity, 75 TFLOPS fp32; DGX B200 data sheet: 1,440 GB
    # at 64 TB/s in all, NVLink 1.8 TB/s a GPU, 8 adapters of 400 Gb/s.
    "b200": _gpu("B200", 2250, 75, 180, 8.0, 900, 50),
}

# Seconds: once a collective, a step over NVLink, a step over the network; and the share of bandwidth reached.
_RING = ((8.4e-6, 3.4e-6, 14.0e-6, 1.0), (6.6e-6, 0.6e-6, 2.7e-6, 0.5))  # Simple, LL
_TREE = ((8.4e-6, 4.0e-6, 14.0e-6, 1.0), (6.8e-6, 0.6e-6, 5.0e-6, 0.5))


def collective_seconds(gpu: Gpu, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
    """Seconds of a collective of ``kind`` (``all_gather``, ``reduce_scatter``, ``all_reduce``) over ``ranks``.

    ``nbytes``: of the whole tensor, the larger side: what an all-gather returns and what a reduce-scatter takes.
    """
    n, nodes = len(ranks), len({rank // GPUS_PER_NODE for rank in ranks})
    if n == 1:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1
    # Each rank passes on all parts but one; between nodes, rings use the adapters of all the group's ranks there.
    over_nvlink = nbytes * (n - 1) / n / gpu.nvlink
    over_network = nbytes * (nodes - 1) / nodes / (n / nodes * gpu.network)
    transfer = max(over_nvlink if n > nodes else 0.0, over_network)

    def cheapest(protocols: tuple, steps: float, hops: float) -> float:
        costs = (base + rounds * (steps * step + hops * hop + transfer / share) for base, step, hop, share in protocols)
        return min(costs)

    ring = cheapest(_RING, n - nodes, nodes - 1)
    if kind != "all_reduce":
        return ring
    return min(ring, cheapest(_TREE, n / nodes - 1, math.ceil(math.log2(nodes))))


_ADA_WHITEPAPER = "NVIDIA Ada GPU Architecture whitepaper, appendix A, peak BF16 tensor TFLOPS with FP32 accumulate"

# (pattern of the whole device name, dense bf16 peak in FLOP/s, Source). Data sheets that give the figure "with
# sparsity" are halved. A name that matches no row (a MIG slice, a laptop part) has no known peak.
_BF16_PEAKS: list[tuple[str, float, str]] = [
    (r"NVIDIA A100[- ].*", 312e12, "NVIDIA A100 data sheet, BFLOAT16 Tensor Core: 312 TFLOPS dense"),
    (r"NVIDIA H100 80GB HBM3", 989.5e12, "NVIDIA H100 data sheet, SXM: 1,979 TFLOPS with sparsity"),
    (r"NVIDIA H100 PCIe", 756.5e12, "NVIDIA H100 data sheet, PCIe: 1,513 TFLOPS with sparsity"),
    (r"NVIDIA H200", 989.5e12, "NVIDIA H200 data sheet, SXM: 1,979 TFLOPS with sparsity"),
    (r"NVIDIA B200", 2250e12, "NVIDIA HGX B200 data sheet, BF16 of one GPU: 4.5 PFLOPS with sparsity"),
    (r"NVIDIA L40S", 362.05e12, "NVIDIA L40S data sheet, BFLOAT16 Tensor Core: 362.05 TFLOPS dense"),
    (r"NVIDIA GeForce RTX 4090", 165.2e12, _ADA_WHITEPAPER),
]


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak dense FLOP/s of one device by its vendor, None where unknown. Only bfloat16 matrix products are listed:
    the fp32 peak depends on whether TF32 is allowed."""
    if dtype is torch.bfloat16 and " MIG " not in device_name:
        for pattern, peak, _source in _BF16_PEAKS:
            if re.fullmatch(pattern, device_name):
                return peak
    return None


def mfu(tokens_per_s: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilization in [0, 1]: the share of ``peak`` (FLOP/s of all devices that share the ``tokens_per_s``)
    that the model's own arithmetic needs, recomputation not counted. None where ``peak`` is.

    Source: Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B.
    """
    return None if peak is None else tokens_per_s * flops_per_token / peak
