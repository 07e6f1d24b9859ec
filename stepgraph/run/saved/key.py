"""Keys of saved steps: everything below the trace that affects passes and compilers, in named parts.

- ``graph``: the traced graphs whole: operators with their schemas, arguments, provenance and roles, the form of every
  value, the schedule of calls, and hashes of the constants' values;
- ``passes``: their order and their options;
- ``versions``: torch, Triton and what else takes part in compiling, and a hash of stepgraph's sources;
- ``device``: the GPU's kind, or the CPU's vector registers and threads;
- ``settings``: torch's switches, Inductor's configuration, and the environment variables that compilers read;
- ``mesh``, ``pipeline``: how ranks are laid out, the groups that the graphs name, and this rank's stages.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stepgraph import compat
from stepgraph.graph.collectives import spans_machines
from stepgraph.graph.program import StepProgram
from stepgraph.inductor.packed import NotSavable
from stepgraph.parallel.pipeline import Pipeline
from stepgraph.passes.contract import Pass

#: The version of the file format: entries of another version are never read.
FORMAT = 3
#: Packages, in addition to torch, that passes call, or that Inductor and Triton are made with.
_PACKAGES = ("triton", "sympy", "mpmath", "numpy", "flash-attn-4", "quack-kernels")
#: Environment variables that Inductor, Triton, their host compilers and torch's libraries read.
_VARIABLES = re.compile(r"TORCHINDUCTOR_|TRITON_|TORCH_COMPILE|TORCH_BLAS|CUBLAS|CUDNN|NVIDIA_TF32|ATEN_|CXX$|CC$")
#: Names among them that say where files lie, how many processes compile and what is printed.
_ELSEWHERE = re.compile(r"_DIR$|_PATH$|_DUMP|_DEBUG|_LOG|COMPILE_THREADS$|_PRINT_")


def digest(value: Any) -> str:
    """A hash of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def entry_name(parts: Mapping[str, Any]) -> str:
    """The name of the entry with this key."""
    return f"step-{digest(parts)[:32]}"


def differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The parts that differ, in the order of ``now``, each with the names in it that do: ``versions (torch)``."""
    found = []
    for part in [*now, *(name for name in saved if name not in now)]:
        a, b = saved.get(part), now.get(part)
        if a != b:
            both = isinstance(a, dict) and isinstance(b, dict)
            names = [name for name in {**b, **a} if a.get(name) != b.get(name)] if both else []
            found.append(f"{part} ({', '.join(names)})" if names else part)
    return found


def versions() -> dict[str, str]:
    """What passes and compilers are made of: packages, and stepgraph's own sources."""
    found = {"format": str(FORMAT), "python": platform.python_version(), "torch": torch.__version__}
    found |= {"cuda": str(torch.version.cuda), "stepgraph": own_sources()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


@functools.cache
def own_sources() -> str:
    """A hash of stepgraph's own files, which may change without its version."""
    root = Path(__file__).parents[2]
    files = sorted(root.rglob("*.py"))
    return digest([[str(file.relative_to(root)), hashlib.sha256(file.read_bytes()).hexdigest()] for file in files])


def device_facts(device: torch.device, compiles: bool) -> dict[str, Any]:
    """What the step runs on. Compiled code names the GPU by its number, so the number belongs to the key where there is
    such code; code for a CPU depends on its threads and vector registers."""
    found: dict[str, Any] = {"type": device.type}
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "kind": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "processors": properties.multi_processor_count,
        }
        if compiles:
            found["number"] = torch.cuda.current_device() if device.index is None else device.index
    found |= {"cpu": platform.machine(), "vectors": torch.backends.cpu.get_cpu_capability()}
    return found | ({"threads": torch.get_num_threads()} if device.type == "cpu" else {})


def settings(compiles: bool) -> dict[str, str]:
    """torch's own settings that a kernel's choice or a compiler reads."""
    cuda = torch.backends.cuda
    found = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "autocast dtypes": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "tf32": _tf32(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "attention": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.fp16_bf16_reduction_math_sdp_allowed(),
        ],
        "reduced precision": [
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
        ],
    }
    if compiles:
        found["inductor"] = compat.inductor_settings()
        found |= {name: value for name, value in os.environ.items() if _VARIABLES.match(name)}
        found = {name: value for name, value in found.items() if not _ELSEWHERE.search(name)}
    return {name: str(value) for name, value in found.items()}


def _tf32() -> list[Any]:
    """Whether products and convolutions may round to TF32, as torch's older and newer switches say."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    found = [getattr(part, "fp32_precision", None) for part in (torch.backends, cuda, cudnn, torch.backends.mkldnn)]
    try:
        return [*found, cuda.allow_tf32, cudnn.allow_tf32]
    except RuntimeError:  # torch refuses to say where both kinds of switches were used
        return [*found, "mixed"]


def mesh_facts(mesh: DeviceMesh | None, program: StepProgram) -> dict[str, Any]:
    """The ranks, how they are laid out, and the groups that the graphs of ``program`` name. Which of the ranks this one
    is does not count: the ranks of a group are counted from its first."""
    if not dist.is_initialized():
        return {"ranks": 1}
    found: dict[str, Any] = {"ranks": dist.get_world_size()}
    found["ranks a machine"] = os.environ.get("LOCAL_WORLD_SIZE", "all")
    if mesh is not None:
        found |= {"axes": list(mesh.mesh_dim_names or ()), "sizes": list(mesh.mesh.shape)}
    groups = {}
    for name in sorted({name for step in program.graphs.values() for name in step.axes}):
        first, *others = dist.get_process_group_ranks(compat.process_group(name))
        groups[name] = [[rank - first for rank in others], spans_machines(name) is None]
    return found | {"groups": groups}


def pipeline_facts(pipeline: Pipeline | None) -> dict[str, Any]:
    """Which stages this rank has of which pipeline."""
    if pipeline is None:
        return {}
    found = {"schedule": pipeline.name, "starts": list(pipeline.starts), "ranks": pipeline.ranks_of}
    found |= {"symmetric": pipeline.symmetric}
    return found | {"rank": pipeline.rank, "holders": digest(sorted(pipeline.holders.items()))}


def pass_facts(passes: Sequence[Pass]) -> dict[str, Any]:
    """Each pass with its options. Raises `NotSavable` for a pass that is not stepgraph's own: what it reads is
    unknown, and so is what of it a key must hold."""
    found: dict[str, Any] = {"order": [p.name for p in passes]}
    for p in passes:
        if not p.apply.__module__.startswith("stepgraph."):
            raise NotSavable(f"the pass {p.name} is not of stepgraph: what it reads besides the graph is unknown")
        options = {field.name: getattr(p.options, field.name) for field in dataclasses.fields(p.options)}
        found[p.name] = {name: repr(_plain(value, f"{p.name}.{name}")) for name, value in options.items()}
    return found


def _plain(value: Any, where: str) -> Any:
    """``value``, if its ``repr`` says all of it. Raises `NotSavable`."""
    if isinstance(value, tuple | list):
        return [_plain(item, where) for item in value]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise NotSavable(f"the option {where}={value!r} has no saved form")
