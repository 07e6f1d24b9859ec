"""Keys of saved steps: named parts, of which a miss says the one that differs."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.passes.contract import Pass
from stepgraph.run.saved.reads.places import UNDER_TORCH

#: The version of what is written here and beside: entries of another are never read.
FORMAT = 1
_LONGEST = 60  # characters of a value in a message


def digest(value: Any) -> str:
    """A hash of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def entry_name(kind: str, parts: Mapping[str, Any]) -> str:
    """The name of the entry with this key."""
    return f"{kind}-{digest(parts)[:32]}"


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, each in a few words, the parts in the order of ``now``."""
    found = []
    for name in [*now, *(n for n in saved if n not in now)]:
        if saved.get(name) == now.get(name):
            continue
        a, b = saved.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [key for key in {**b, **a} if a.get(key) != b.get(key)]
            shown = [_shown(f"{key} was {{}}, is {{}}", key, a.get(key), b.get(key)) for key in keys[:2]]
            more = f" and {len(keys) - 2} more" if len(keys) > 2 else ""
            found.append(f"{name} ({'; '.join(shown)}{more})")
        else:
            found.append(_shown(f"{name} ({{}}, now {{}})", name, a, b))
    return found


def _shown(text: str, name: str, a: Any, b: Any) -> str:
    """``text`` with both values, or ``name`` alone where they are hashes, which say nothing to people."""
    if all(isinstance(value, str) and re.fullmatch("[0-9a-f]{32,}", value) for value in (a, b)):
        return name
    return text.format(_short(a), _short(b))


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def versions() -> dict[str, str]:
    """Of all that decides what a capture, a pass and a compiler make: packages, and stepgraph's own sources."""
    found = {"format": str(FORMAT), "python": platform.python_version(), "torch": torch.__version__}
    found |= {"cuda": str(torch.version.cuda), "stepgraph": own_sources()}
    for package in ("numpy", *UNDER_TORCH, "opt-einsum", "transformers", "flash-attn-4", "quack-kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


@functools.cache
def own_sources() -> str:
    """A hash of stepgraph's own files, as they may change without its version."""
    root = Path(__file__).parents[2]
    files = sorted(root.rglob("*.py"))
    return digest([[str(file.relative_to(root)), hashlib.sha256(file.read_bytes()).hexdigest()] for file in files])


def device_facts(device: torch.device, compiles: bool) -> dict[str, Any]:
    """What the step runs on. Compiled code names the GPU by its number, so that belongs to the key where there is any;
    and code for a CPU counts its threads and vector registers."""
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
    """torch's own settings that a trace, a kernel's choice or a compiler reads."""
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
        "einsum": [torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy],
        "reduced precision": [
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
        ],
    }
    if compiles:
        found["inductor"] = compat.inductor_settings()
    return {name: str(value) for name, value in found.items()}


def _tf32() -> list[Any]:
    """Whether products and convolutions may round to TF32, as torch's older and newer switches say."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    found = [getattr(part, "fp32_precision", None) for part in (torch.backends, cuda, cudnn, torch.backends.mkldnn)]
    try:
        return [*found, cuda.allow_tf32, cudnn.allow_tf32]
    except RuntimeError:  # torch refuses to say where both kinds of switches were used
        return [*found, "mixed"]


def mesh_facts(mesh: Any) -> dict[str, Any]:
    """The ranks and how they are laid out; which of them this one is does not count."""
    if not dist.is_initialized():
        return {"ranks": 1}
    found: dict[str, Any] = {"ranks": dist.get_world_size()}
    found["ranks a machine"] = os.environ.get("LOCAL_WORLD_SIZE", "all")
    if mesh is not None:
        found |= {"axes": list(mesh.mesh_dim_names or ()), "sizes": list(mesh.mesh.shape)}
    return found


def pipeline_facts(pipeline: Any) -> dict[str, Any]:
    """Which stages this rank has of which pipeline."""
    if pipeline is None:
        return {}
    found = {"schedule": pipeline.name, "starts": list(pipeline.starts), "ranks": pipeline.ranks_of}
    found |= {"symmetric": pipeline.symmetric}
    return found | {"rank": pipeline.rank, "holders": digest(sorted(pipeline.holders.items()))}


def pass_facts(passes: Sequence[Pass]) -> dict[str, Any]:
    """Each pass with its options; one that is not of stepgraph also with its source file."""
    found = {}
    for p in passes:
        options = {field.name: repr(getattr(p.options, field.name)) for field in dataclasses.fields(p.options)}
        if not p.apply.__module__.startswith("stepgraph."):
            options["source"] = _source_of(p.apply)
        found[p.name] = options
    return found | {"order": [p.name for p in passes]}


def _source_of(function: Any) -> str:
    file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file():
        raise ValueError(f"the pass {function.__qualname__} has no source file")
    held = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return digest([hashlib.sha256(Path(file).read_bytes()).hexdigest(), *held])
