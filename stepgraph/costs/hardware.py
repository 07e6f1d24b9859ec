"""GPUs: the published figures of each, the share of them that kernels reach, and the GPU that passes assume."""

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

#: GPUs of one HGX or DGX machine, joined by NVLink.
GPUS_PER_NODE = 8

#: Shares of a GPU's published figures that kernels reach: matrix products and attention of its FLOP/s, all others of
#: its memory bandwidth. Source: an H200 under load, at the shapes of Llama 3 8B (benchmarks/h200_x2_roofline.json):
#: products run at 674 to 693 TFLOP/s, attention at 494 (535 forward, 479 backward), a copy at 4.25 TB/s. Attention by a
#: backend that was measured has its own share (see `costs.attention`).
PRODUCTS_REACHED, ATTENTION_REACHED, MEMORY_REACHED = 0.69, 0.50, 0.885

#: The same of products in fp8, of their own peak. Source: an H200, torch's ``_scaled_mm`` at the shapes of Llama 3 8B:
#: 1,190 to 1,370 TFLOP/s, with one scale or with one for each row.
FP8_REACHED = 0.65

#: The same of grouped products, of all expert rows. Source: an H200, torch 2.11's own at 16 to 64 experts: 550 to 635
#: TFLOP/s, gradients of weights 470 to 610.
GROUPED_REACHED = 0.57

#: The same of `stepgraph.kernels.gram`, over the tiles that it computes: 535 to 565 TFLOP/s for stacks of 2,048 rows
#: and for one matrix of 4,096, on an H200, where cuBLAS reached 680 to 800.
GRAM_REACHED = 0.55

#: Seconds that any kernel takes, however little it does, also inside a CUDA graph: starting and draining the GPU.
#: Source: steps of 13 models on H100s, 475 to 1,842 kernels each, inside CUDA graphs: forecasts with it are a median
#: 4.2% off the measured times, without it 7.1% (benchmarks/h100_forecasts.json).
LAUNCH_S = 2.5e-6

#: Seconds of a short kernel between products and copies (on H200s one that waits for another rank's flag took 3.4 us),
#: and of such a flag's way over NVLink.
SHORT_KERNEL_S, FLAG_S = 4e-6, 5e-6

#: Bytes/s between a GPU and page-locked memory of its host in each direction, and seconds to begin a copy. PCIe 5.0 x16
#: moves 63 GB/s (data sheets of H100, H200 and B200); 0.8 of it is an assumption, not a measurement.
HOST_LINK, HOST_COPY_S = 0.8 * 63e9, 10e-6

#: Bytes of host memory for each GPU of a forecast machine. Source: DGX H100 and H200 data sheets, 2 TB for eight.
HOST_MEMORY = 2e12 / GPUS_PER_NODE


def host_copy_seconds(nbytes: int) -> float:
    """Seconds to copy ``nbytes`` between a GPU and page-locked memory of its host."""
    return HOST_COPY_S + nbytes / HOST_LINK


def free_host_memory() -> float | None:
    """Bytes that are free on this machine, or in its control group, for each rank on it; None where unknown."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # "max", or no such group
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        free = min(free, int((group / "memory.max").read_text()) - used)
    return max(free, 0) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_text(device: torch.device, system: Path = Path("/sys")) -> str:
    """One line: the host memory that this rank may take, and where it lies for the GPU ``device``; empty for a CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    gpu = torch.cuda.get_device_properties(device)
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    free, near, nodes = free_host_memory(), -1, []
    with contextlib.suppress(OSError, ValueError):  # a virtual machine may not say
        near = int((system / "bus/pci/devices" / place / "numa_node").read_text())
        mine = os.sched_getaffinity(0)
        for node in (system / "devices/system/node").glob("node[0-9]*"):
            if mine & _numbers((node / "cpulist").read_text()):
                nodes.append(int(node.name.removeprefix("node")))
    line = f"host memory: {'unknown' if free is None else f'{free / 2**30:.1f} GiB'} free for this rank"
    if near < 0 or not nodes:
        return f"{line}; the GPU's NUMA node is unknown"
    if nodes == [near]:
        return f"{line}, on the GPU's NUMA node {near}"
    return (
        f"{line}; the GPU is on NUMA node {near} and this process may run on {', '.join(map(str, sorted(nodes)))}: "
        f"numactl --cpunodebind={near} --membind={near} keeps copies from crossing"
    )


def _numbers(text: str) -> set[int]:
    """Those of a list such as ``0-3,8``."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    return {n for first, _, last in ends for n in range(int(first), int(last or first) + 1)}


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``devices``: regular expression that the whole device name, as torch gives it, matches. ``flops``: peak
    dense FLOP/s of matrix products by dtype. ``memory``: bytes. ``bandwidth``: of memory, bytes/s. ``nvlink``,
    ``network``: bytes/s of one GPU in one direction. ``capability``: compute capability. 0: not in the table, because
    nothing needs it yet. ``processors``: streaming multiprocessors."""

    name: str
    devices: str
    flops: dict[torch.dtype, float]
    memory: float = 0.0
    bandwidth: float = 0.0
    nvlink: float = 0.0
    network: float = 0.0
    capability: tuple[int, int] = (0, 0)
    processors: int = 0

    def peak(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s of matrix products of ``dtype``, that of fp32 for any other dtype."""
        return self.flops[dtype if dtype in self.flops else torch.float32]

    def kernel_seconds(
        self, flops: float, dtype: torch.dtype, moved: int, *, reached: float = PRODUCTS_REACHED
    ) -> float:
        """Seconds of a kernel that runs ``flops`` of ``dtype`` and moves ``moved`` bytes, by the roofline. ``reached``:
        the share of the peak that its arithmetic reaches."""
        arithmetic = flops / self.peak(dtype) / reached
        return max(arithmetic, self.moving_seconds(moved))

    def moving_seconds(self, moved: int) -> float:
        """Seconds to read and write ``moved`` bytes of memory."""
        return moved / (MEMORY_REACHED * self.bandwidth)


def _bf16(tflops: float) -> dict[torch.dtype, float]:
    return {torch.bfloat16: tflops * 1e12, torch.float16: tflops * 1e12}


def _server(
    name: str,
    devices: str,
    bf16: float,
    fp8: float,
    fp32: float,
    memory: float,
    bandwidth: float,
    nvlink: float,
    network: float,
    capability: tuple[int, int],
    processors: int,
) -> Gpu:
    """TFLOP/s of bf16, fp8 and fp32 products, GB, TB/s, GB/s."""
    eight = dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), fp8 * 1e12)
    flops = _bf16(bf16) | eight | {torch.float32: fp32 * 1e12}
    rates = bandwidth * 1e12, nvlink * 1e9, network * 1e9
    return Gpu(name, devices, flops, memory * 1e9, *rates, capability, processors)


#: GPUs of eight-GPU machines, by the name that ``stepgraph plan --gpu`` takes. TFLOP/s without sparsity (data sheets
#: that give bf16 and fp8 "with sparsity" are halved; fp32 is without TF32), GB, TB/s, GB/s in one direction (data
#: sheets give both together). The network is one 400 Gb/s adapter for each GPU. Processors: as CUDA counts them.
GPUS: dict[str, Gpu] = {
    # NVIDIA H100 data sheet, SXM: 1,979 TFLOPS bf16 and 3,958 fp8 with sparsity, 67 fp32, 80 GB, 3.35 TB/s, NVLink
    # 900 GB/s; DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s.
    "h100": _server("H100 SXM", r"NVIDIA H100 80GB HBM3", 989.5, 1979, 67, 80, 3.35, 450, 50, (9, 0), 132),
    # NVIDIA H200 data sheet, SXM: the same at 4.8 TB/s; DGX H200 data sheet: 8 ConnectX-7 of 400 Gb/s. Memory as torch
    # counts it, 139.8 GiB: the data sheet's 141 GB are less.
    "h200": _server("H200 SXM", r"NVIDIA H200", 989.5, 1979, 67, 150.1, 4.8, 450, 50, (9, 0), 132),
    # NVIDIA HGX B200 data sheet, per GPU: 4.5 PFLOPS bf16 and 9 fp8 with sparsity, 75 TFLOPS fp32; DGX B200 data sheet:
    # 1,440 GB at 64 TB/s in all, NVLink 1.8 TB/s for each GPU, 8 adapters of 400 Gb/s.
    "b200": _server("B200", r"NVIDIA B200", 2250, 4500, 75, 180, 8.0, 900, 50, (10, 0), 148),
}

#: GPUs of which only the bf16 peak is needed, for the MFU. TFLOP/s, dense.
_OTHERS = (
    Gpu("A100", r"NVIDIA A100[- ].*", _bf16(312)),  # NVIDIA A100 data sheet, BFLOAT16 Tensor Core
    Gpu("H100 PCIe", r"NVIDIA H100 PCIe", _bf16(756.5)),  # NVIDIA H100 data sheet, PCIe: 1,513 with sparsity
    Gpu("L40S", r"NVIDIA L40S", _bf16(362.05)),  # NVIDIA L40S data sheet, BFLOAT16 Tensor Core
    # NVIDIA Ada GPU Architecture whitepaper, appendix A, peak BF16 tensor TFLOPS with FP32 accumulate
    Gpu("RTX 4090", r"NVIDIA GeForce RTX 4090", _bf16(165.2)),
)

#: What passes decide by, and what their notes are forecast for. One GPU for all: every rank and every machine makes the
#: same graph, and so does a forecast, which has no device. On other GPUs the ratios differ little.
ASSUMED = GPUS["h200"]


def interpolated(figures: Mapping[int, float], size: int) -> float:
    """The figure at ``size``, in the logarithm of the sizes that ``figures`` are known for; beyond them the nearest."""
    sizes = sorted(figures)
    return float(np.interp(math.log(size), np.log(sizes), [figures[known] for known in sizes]))


def known_gpu(device_name: str) -> Gpu | None:
    """The GPU whose device torch calls ``device_name``, None where there is none in the table (a MIG slice, a laptop
    part)."""
    found = (gpu for gpu in (*GPUS.values(), *_OTHERS) if re.fullmatch(gpu.devices, device_name))
    return None if " MIG " in device_name else next(found, None)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak dense FLOP/s of one device by its vendor, None where unknown. Only bfloat16 matrix products are listed:
    the fp32 peak depends on whether TF32 is allowed."""
    gpu = known_gpu(device_name) if dtype is torch.bfloat16 else None
    return gpu.peak(dtype) if gpu else None


def mfu(tokens_per_s: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilization in [0, 1]: the share of ``peak`` (FLOP/s of all devices that share the ``tokens_per_s``)
    that the model's own arithmetic needs, recomputation not counted. None where ``peak`` is.

    Source: Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B.
    """
    return None if peak is None else tokens_per_s * flops_per_token / peak
