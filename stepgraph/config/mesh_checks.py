"""Which meshes a run can have, and which of its options are about ranks that there are."""

from typing import Any

from stepgraph.models import family_of
from stepgraph.parallel import SCHEDULES, MeshSpec, check_schedule
from stepgraph.parallel.pipeline.layout import check_blocks, check_split

#: What options are about, and how a run gets it.
_STAGES = "stages and there are none: add pp=2 to --mesh"
_EXPERTS = "ep and there is none: add ep=2 to the mesh"
_RANKS = "ranks and there is no mesh: add --mesh"


def check_mesh(config: Any) -> None:
    """Raises ValueError, in one line, where a `TrainConfig`'s mesh and options about ranks do not go together."""
    if config.nproc is not None and config.nproc < 1:
        raise ValueError(f"nproc={config.nproc} must be above 0")
    if config.max_restarts and config.nproc is None:
        raise ValueError(
            f"max_restarts={config.max_restarts} is about the ranks of --nproc: add --nproc, or give it to torchrun"
        )
    spec = config.mesh_spec
    idle = {  # option -> (its value that asks for nothing, whether there is what it is about, that and the fix)
        **dict.fromkeys(("pipeline", "split"), (None, spec and spec.pp > 1, _STAGES)),
        "stage_sends": ("point-to-point", spec and spec.pp > 1, _STAGES),
        "expert_chunks": (1, spec and spec.ep > 1, _EXPERTS),
        "expert_exchange": ("collectives", spec and spec.ep > 1, _EXPERTS),
        "reshard": ("auto", spec, _RANKS),
        "reduce_dtype": ("fp32", spec, _RANKS),
    }
    for name, (plain, there, about) in idle.items():
        if getattr(config, name) != plain and not there:
            raise ValueError(f"{name}={getattr(config, name)} is about {about}")
    if spec is None:
        if config.nproc not in (None, 1):
            raise ValueError(f"nproc={config.nproc} has no mesh to work on: add --mesh fsdp={config.nproc}")
        return
    if config.nproc is not None:
        spec.check_world(config.nproc)
    if config.expert_chunks > (tokens := config.batch_size * config.seq_len // spec.tp):
        raise ValueError(f"expert_chunks={config.expert_chunks} is above the {tokens} tokens of a microbatch; try 2")
    _check_pipeline(config, spec)
    sizes = family_of(config.model).tp_sizes
    spec.check_divides({name: getattr(config.model, name) for name in sizes} | {"seq_len": config.seq_len})
    if spec.ep > 1:
        if not hasattr(config.model, "moe"):
            raise ValueError(f"mesh {spec} spreads experts and the model has none; drop ep={spec.ep}")
        spec.check_divides({"model.moe.n_experts": config.model.moe.n_experts}, "ep")


def _check_pipeline(config: Any, spec: MeshSpec) -> None:
    if spec.pp == 1:
        return
    schedule, blocks = config.pipeline_schedule, config.model.n_layers
    check_schedule(schedule, spec.pp, config.accumulate)
    check_blocks(blocks, spec.pp, schedule)
    if config.stage_starts is not None:
        check_split(config.stage_starts, blocks, spec.pp * SCHEDULES[schedule].chunks, schedule, spec.pp)
    refused = {
        "verify": (config.verify, "compares with eager, which runs whole models"),
        "any_length": (config.any_length, "compiles whole steps"),
        "init_from_hf": (config.init_from_hf, "fills whole models"),
        "export_hf": (config.export_hf, "writes whole models; the checkpoint loads on any mesh"),
    }
    for name, (given, why) in refused.items():
        if given:
            raise ValueError(f"{name} {why}, and mesh={config.mesh} cuts the model into stages: drop pp from the mesh")
