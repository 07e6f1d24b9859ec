"""The forecast of a training step on a cluster you do not have: capture in a fake world, memory, time."""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepgraph import compat, parallel
from stepgraph.capture.fake import fake_mode
from stepgraph.config import build
from stepgraph.config.command_line import given
from stepgraph.config.commands import FORECAST
from stepgraph.config.train import TrainConfig
from stepgraph.costs import links
from stepgraph.costs.hardware import GPUS_PER_NODE, Gpu
from stepgraph.costs.memory import Moment
from stepgraph.costs.step import graph_cost, step_cost
from stepgraph.costs.timeline import Timeline
from stepgraph.graph.program import StepProgram
from stepgraph.inspect.forecast.tables import time_over_peak
from stepgraph.lower import StepSpec, lower
from stepgraph.models import family_of, flops_per_token
from stepgraph.options import names
from stepgraph.passes import Target


@dataclass(frozen=True, kw_only=True)
class ClusterForecast:
    """What forecasts with and without a pipeline share. ``imbalance``: rows that this rank's experts receive over the
    mean of all ranks, of its stage in a pipeline."""

    config: TrainConfig
    gpu: Gpu
    capture_s: float
    plan_s: float
    imbalance: float = 1.0

    @property
    def ranks(self) -> int:
        """Number of ranks, one per GPU."""
        return self.config.mesh_spec.size if self.config.mesh_spec else 1

    @property
    def title(self) -> str:
        """The run and the GPUs."""
        config, spec = self.config, self.config.mesh_spec
        loaded = f", the most loaded rank at {self.imbalance:g} times the mean" if spec and spec.ep > 1 else ""
        return (
            f"{config.preset} on {self.ranks:,} x {self.gpu.name}{f' ({spec})' if spec else ''}, "
            f"{config.batch_text}, {config.precision}, memory {config.memory}{loaded}"
        )

    def mfu_of(self, step_s: float) -> float:
        """Model FLOPs utilization in [0, 1] of a step of ``step_s``, of the peak that the precision allows."""
        return model_flops(self.config) / step_s / self.gpu.peak(self.config.products_dtype)

    def to_json(self) -> dict[str, Any]:
        """The run, as plain values; seconds."""
        return {
            "preset": self.config.preset,
            "model": dataclasses.asdict(self.config.model),
            "mesh": str(self.config.mesh_spec or ""),
            "ranks": self.ranks,
            "gpu": self.gpu.name,
            "imbalance": self.imbalance,
            "settings": {key: getattr(self.config, key) for key in SETTINGS},
            "capture_s": self.capture_s,
            "plan_s": self.plan_s,
        }


@dataclass(frozen=True, kw_only=True)
class Forecast(ClusterForecast):
    """The forecast of one rank's step. ``moments``: memory over the step. ``flops``: the FLOPs that the graph runs."""

    nodes: int
    moments: list[Moment]
    timeline: Timeline
    flops: int
    over_peak: dict[str, Any] | None = None

    @property
    def peak(self) -> Moment:
        """The fullest moment of the step."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def mfu(self) -> float:
        return self.mfu_of(self.timeline.step_seconds)

    @property
    def overlapped_seconds(self) -> float:
        """Seconds of the step if every collective overlapped computation: the longest of computation and of each
        process group's collectives."""
        by_axis: dict[str, float] = defaultdict(float)
        for collective in self.timeline.collectives:
            by_axis[collective.axis] += collective.seconds
        return max(self.timeline.compute_seconds, *by_axis.values(), 0.0)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values; bytes and seconds."""
        return super().to_json() | {
            "nodes": self.nodes,
            "peak_bytes": self.peak.total,
            "memory": [dataclasses.asdict(moment) | {"total": moment.total} for moment in self.moments],
            "step_s": self.timeline.step_seconds,
            "compute_s": self.timeline.compute_seconds,
            "exposed_s": self.timeline.exposed_seconds,
            "overlapped_step_s": self.overlapped_seconds,
            "tokens_per_s": self.config.tokens_per_step / self.timeline.step_seconds,
            "mfu": self.mfu,
            "regions": region_rows(self.timeline.regions),
            "flops": self.flops,
            "model_flops": model_flops(self.config),
            "collectives": [dataclasses.asdict(collective) for collective in self.timeline.collectives],
            "time_over_peak": self.over_peak,
            "offload": [dataclasses.asdict(copy) for copy in self.timeline.copies],
        }


#: Options of a run that a forecast depends on, except its mesh and stages.
SETTINGS = tuple(name for name in names(*FORECAST) if name not in ("mesh", "pipeline", "split"))


def forecast(config: TrainConfig, gpu: Gpu, imbalance: float = 1.0) -> Forecast:
    """The forecast of ``config``'s step on ``gpu``: on its mesh, or in one process.

    Rank 0's step is captured as the CPU runs it: its collectives and shapes are the GPU's, and the pass ``attention``
    replaces the CPU's operators with the GPU's. The passes are the same as in a run. Where ``config`` compiles, nodes
    between matrix products count as fused. Nothing is computed or allocated, and this process is the only rank.

    ``imbalance``: with ``ep``, rows that the most loaded rank's experts receive over the mean of all ranks, in every
    layer: that rank's step is forecast, because all others wait for it, with the capacity that training would reach.

    Raises ``ValueError`` for a configuration that cannot be right, and inside a process group.
    """
    check_imbalance(imbalance, config.mesh_spec)
    config = with_room(config, imbalance)
    start = time.perf_counter()
    with simulated(config, gpu) as (program, groups):
        cost = step_cost(
            [
                (graph_cost(step, gpu, groups, fused=config.compiles_all, load=imbalance), n)
                for step, n in program.counted()
            ]
        )
    return Forecast(
        config=config,
        gpu=gpu,
        nodes=sum(1 for step in program.graphs.values() for _ in step.nodes()),
        capture_s=program.capture_s,
        moments=cost.moments,
        timeline=cost.timeline,
        flops=cost.flops,
        plan_s=time.perf_counter() - start,
        imbalance=imbalance,
        over_peak=time_over_peak(program.reports, config.memory, gpu.memory, config.accumulate),
    )


def check_imbalance(imbalance: float, spec: parallel.MeshSpec | None) -> None:
    """``ValueError`` unless the most loaded of ``spec.ep`` ranks can receive ``imbalance`` times the mean."""
    if (spec is None or spec.ep == 1) and imbalance != 1:
        raise ValueError(f"imbalance={imbalance:g} needs experts spread over ranks: add ep=2 to --mesh")
    if spec is not None and not 1 <= imbalance <= spec.ep:
        raise ValueError(
            f"imbalance={imbalance:g} is the most loaded rank's rows over the mean of all: use 1 to {spec.ep}, which "
            "is every row on one rank"
        )


def with_microbatches(config: TrainConfig, words: list[str]) -> TrainConfig:
    """``config``; where ``words`` do not say how many microbatches a step has and a pipeline has more ranks than the
    preset has of them, with twice as many as ranks: enough for every schedule."""
    ranks = config.mesh_spec.pp if config.mesh_spec else 1
    few = config.accumulate < ranks and "accumulate" not in given(words)
    return dataclasses.replace(config, accumulate=2 * ranks) if few else config


def with_room(config: TrainConfig, imbalance: float) -> TrainConfig:
    """``config`` with the expert capacity that training would reach at ``imbalance``: doubled until it fits."""
    while config.expert_capacity < imbalance:
        config = dataclasses.replace(config, expert_capacity=2 * config.expert_capacity)
    return config


@contextlib.contextmanager
def simulated(config: TrainConfig, gpu: Gpu, rank: int = 0) -> Iterator[tuple[StepProgram, dict[str, links.Group]]]:
    """The program of one ``rank`` of ``config``'s step on ``gpu``, rewritten, and its process groups, open inside.

    Needs neither the cluster nor the GPU; without a mesh there is one rank. Raises ``ValueError`` for a configuration
    that cannot be right, and inside a process group.
    """
    with fake_world(config, rank) as mesh:
        program = lower(simulated_spec(config, mesh), Target.forecast(gpu)).program
        meshes = [] if mesh is None else [mesh] if mesh.experts is None else [mesh, mesh.experts]
        axes = {name: axes.axis(name).get_group() for axes in meshes for name in axes.names}
        axes |= {"cp": mesh.context_group} if mesh is not None and mesh.context_group else {}
        yield program, links.groups(axes) if axes else {}


@contextlib.contextmanager
def fake_world(config: TrainConfig, rank: int = 0) -> Iterator[parallel.Mesh | None]:
    """The mesh of ``config`` as its ``rank`` sees it, although no other rank exists; None without a mesh.

    Raises ``ValueError`` for a configuration that cannot be right, and inside a process group.
    """
    config.validate()
    if dist.is_initialized():
        raise ValueError("a process group is open and a forecast makes one of its own: close it first")
    spec = config.mesh_spec
    if config.expert_exchange == "symmetric" and GPUS_PER_NODE % spec.ep:
        raise ValueError(
            f"expert_exchange=symmetric works within a machine, of {GPUS_PER_NODE} GPUs, and ep={spec.ep} needs "
            f"several: use ep={GPUS_PER_NODE}, or use collectives"
        )
    if config.stage_sends == "symmetric" and spec.size > GPUS_PER_NODE:
        raise ValueError(
            f"stage_sends=symmetric works within a machine, of {GPUS_PER_NODE} GPUs, and mesh={spec} needs several: "
            "use point-to-point"
        )
    if spec is not None:
        compat.init_fake_world(rank, spec.size)
    try:
        yield None if spec is None else parallel.Mesh(spec, "cpu")
    finally:
        if spec is not None:
            dist.destroy_process_group()


def region_rows(regions: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Seconds of computation by region and phase, as plain values."""
    return [{"region": region, "phase": phase, "compute_s": s} for (region, phase), s in regions.items()]


def model_flops(config: TrainConfig) -> float:
    """FLOPs of one step that the MFU counts, one rank's share."""
    ranks = config.mesh_spec.size if config.mesh_spec else 1
    return flops_per_token(config.model, config.seq_len) * config.tokens_per_step / ranks


def simulated_spec(config: TrainConfig, mesh: parallel.Mesh | None) -> StepSpec:
    """The step of ``config`` on a simulated rank; its tensors have no values."""
    device = torch.device("cpu")
    with fake_mode():
        model = _one_rank(config, device) if mesh is None else build.empty_model(config, device, mesh)
        optimizer = build.build_optimizer(config, model)
        batch = build.example_batch(config, device)
    return build.step_spec(config, model, build.build_loss(config, device, mesh), batch, optimizer)


def _one_rank(config: TrainConfig, device: torch.device) -> nn.Module:
    """The model that `build.empty_model` returns without a mesh. ``to_empty`` cannot make fakes of meta tensors."""
    with torch.device("meta"):
        model = family_of(config.model).model(config.model)
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(param, device=device, dtype=dtype))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    return model
