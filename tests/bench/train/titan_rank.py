"""A rank of ``bench train`` whose torchtitan runs on a CPU over gloo, without its compiler.

torchtitan looks for a GPU when it is imported. What is replaced is that, what it asks of a GPU's memory, and nothing of
what it trains or sends.
"""

import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402

from stepgraph.bench.train import rank as train_rank  # noqa: E402
from stepgraph.bench.train import titan  # noqa: E402
from stepgraph.bench.train.titan import job_sections  # noqa: E402

set_factor = FSDPModule.set_gradient_divide_factor

_PEAK = metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
_MONITOR = types.SimpleNamespace(device_name="", get_peak_stats=lambda: _PEAK, reset_peak_stats=lambda: None)


def sections(*args: Any) -> dict[str, dict[str, Any]]:
    """Eager, with products in fp8 emulated."""
    found = job_sections(*args) | {"compile": {"enable": False}}
    if titan.FLOAT8 in found:
        found[titan.FLOAT8] |= {"emulate": True}
    return found


def without_division(module: FSDPModule, factor: float) -> None:
    """NCCL multiplies while it sums; gloo sums, and FSDP multiplies."""
    set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


def main() -> None:
    FSDPModule.set_gradient_divide_factor = without_division
    titan.job_sections = sections
    metrics.build_device_memory_monitor = lambda: _MONITOR
    train_rank.main()


if __name__ == "__main__":
    main()
