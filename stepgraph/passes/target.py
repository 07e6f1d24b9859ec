"""The hardware that a step will run on: facts that passes may use, of this machine or of a forecast one."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from stepgraph.costs.hardware import GPUS_PER_NODE, HOST_MEMORY, Gpu, free_host_memory
from stepgraph.graph.step_graph import StepGraph


@dataclass(frozen=True)
class Target:
    """``device``: its type. ``memory``: bytes of one GPU, None where unknown. ``ranks_per_machine``: neighbours that
    share a machine; 0: as torchrun started them. ``process_groups``: whether there are any. ``simulated``: the step is
    forecast on it and never runs. ``capability``: compute capability of the GPU, None where unknown.
    ``host_memory``: bytes of its host that this rank may take, None where unknown."""

    device: str
    memory: float | None = None
    ranks_per_machine: int = 0
    process_groups: bool = False
    simulated: bool = False
    capability: tuple[int, int] | None = None
    host_memory: float | None = None

    @classmethod
    def of(cls, step: StepGraph) -> "Target":
        """Where ``step``'s tensors are."""
        devices = [node.meta["val"].device for node in step.placeholders() if node.meta["val"].is_cuda]
        return cls.on(devices[0] if devices else torch.device("cpu"))

    @classmethod
    def on(cls, device: torch.device) -> "Target":
        """This process, with its tensors on ``device``."""
        known = device.type == "cuda" and torch.cuda.is_available()  # a fake GPU has no properties
        memory = torch.cuda.get_device_properties(device).total_memory if known else None
        capability = torch.cuda.get_device_capability(device) if known else None
        kind = "cuda" if device.type == "cuda" else "cpu"
        return cls(kind, memory, 0, dist.is_initialized(), capability=capability, host_memory=free_host_memory())

    @classmethod
    def forecast(cls, gpu: Gpu) -> "Target":
        """Machines of eight ``gpu``, simulated."""
        return cls("cuda", gpu.memory, GPUS_PER_NODE, dist.is_initialized(), True, gpu.capability, HOST_MEMORY)
