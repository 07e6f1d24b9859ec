"""Several ranks under transformers' ``Trainer``: the mesh of its arguments, the model's shards, and whole checkpoints.

``Trainer`` and accelerate keep what they do around a step (data, evaluation, logs, callbacks) and see ranks of plain
data parallelism. They wrap nothing: `parallelize` shards the model, and the step's graph holds the collectives.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.compat.replaced import replaced
from stepgraph.parallel import Mesh, MeshSpec, layouts, parallelize, whole_tensor
from stepgraph.parallel.context import context_of
from stepgraph.parallel.layout import Layout

#: By what accelerate's launcher asks for FSDP, and for sizes of a mesh.
_FSDP, _SIZES = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"


def mesh_spec(args: TrainingArguments, mesh: str | None) -> MeshSpec | None:
    """The mesh of the ranks that were started: ``mesh`` as text, else what the arguments and accelerate's launcher ask
    for. None for one process. Raises ``ValueError`` for unsupported arguments.
    """
    spec = MeshSpec.parse(mesh) if mesh is not None else None
    world = args.world_size
    if spec is not None:
        spec.check_world(world)
        if spec.tp * spec.pp > 1:
            raise ValueError(f"mesh {spec}: GraphTrainer takes the axes fsdp, ddp, hsdp, cp and ep; drop tp and pp")
    if world == 1:
        return None
    replicas, context = _replicas(args)
    shards = _checked_fsdp(args)
    for name in ("bf16_full_eval", "fp16_full_eval", "auto_find_batch_size"):
        if getattr(args, name):
            raise ValueError(f"{name}=True is for one process, and there are {world}; drop {name}")
    if spec is not None:
        return spec
    if world % replicas:
        raise ValueError(f"dp_replicate_size={replicas} does not divide {world} processes; use a divisor")
    sizes = {"dp_replicate": replicas, "dp_shard": world // replicas} if shards else {"dp_replicate": world}
    return MeshSpec(**sizes, cp=context)


def _asked(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true")


def _checked_fsdp(args: TrainingArguments) -> bool:
    """Whether FSDP is asked for; ``ValueError`` for its options that have no counterpart in a captured step."""
    if args.fsdp_plugin_args is None and not _asked(_FSDP):
        if args.fsdp:
            raise ValueError("fsdp_config asks for XLA's FSDP; GraphTrainer shards without it: drop xla")
        return False
    from accelerate import FullyShardedDataParallelPlugin

    given = args.fsdp_plugin_args or {}
    version = int(given.get("fsdp_version") or os.environ.get("FSDP_VERSION", 1))
    if version != 2:
        raise ValueError(
            f"fsdp version {version}: GraphTrainer shards as version 2 does; use "
            "fsdp_config={'version': 2}, or --fsdp_version 2 to accelerate launch"
        )
    plugin = FullyShardedDataParallelPlugin(**given)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("FSDP's offload to the CPU: a captured step keeps its shards on the GPU; drop cpu_offload")
    if plugin.activation_checkpointing:
        raise ValueError(
            "FSDP's activation_checkpointing wraps modules; use gradient_checkpointing=True, or a memory option of "
            "stepgraph.StepOptions, instead"
        )
    if plugin.ignored_modules is not None:
        raise ValueError("FSDP's ignored_modules: GraphTrainer shards every parameter; drop ignored_modules")
    return True


def _replicas(args: TrainingArguments) -> tuple[int, int]:
    """(HSDP's replicas, ranks that share sequences), from accelerate's ``ParallelismConfig``."""
    config = args.parallelism_config
    if config is None and _asked(_SIZES):
        from accelerate import ParallelismConfig

        config = ParallelismConfig()
    if config is None:
        return 1, 1
    for name in ("tp_size", "sp_size"):
        if getattr(config, name, 1) > 1:
            raise ValueError(
                f"parallelism_config.{name}={getattr(config, name)}: GraphTrainer takes sizes of dp and cp only"
            )
    return config.dp_replicate_size, getattr(config, "cp_size", 1)


@contextlib.contextmanager
def plain_ranks(args: TrainingArguments) -> Iterator[None]:
    """Inside, an ``Accelerator`` made from ``args`` and the environment knows ranks, and no way to wrap models."""
    held = {name: os.environ.pop(name) for name in (_FSDP, _SIZES) if name in os.environ}
    arguments = {name: getattr(args, name) for name in ("fsdp_plugin_args", "parallelism_config")}
    for name in arguments:
        setattr(args, name, None)
    try:
        yield
    finally:
        os.environ.update(held)
        for name, value in arguments.items():
            setattr(args, name, value)


def share_data(accelerator: Accelerator, spec: MeshSpec) -> None:
    """Let the ranks of ``spec.cp``, neighbours that share sequences, read the same batches; what is gathered for
    metrics has each of them once."""
    prepare, gather, gather_for_metrics = (
        accelerator.prepare_data_loader, accelerator.gather, accelerator.gather_for_metrics,
    )  # fmt: skip
    readers = {"num_processes": spec.dp, "process_index": accelerator.process_index // spec.cp}

    def prepare_with(loader: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("dispatch_batches", None):
            raise ValueError("dispatch_batches=True sends every rank another batch, and ranks of cp read one; drop it")
        return accelerate.data_loader.prepare_data_loader(
            loader, *args, **kwargs | readers | {"torch_device_mesh": None}, dispatch_batches=False
        )

    def prepared(*args: Any, **kwargs: Any) -> Any:
        with replaced(accelerate.accelerator, prepare_data_loader=prepare_with):
            return prepare(*args, **kwargs)

    def once(data: Any) -> Any:
        return recursively_apply(lambda x: x.unflatten(0, (spec.dp, spec.cp, -1))[:, 0].flatten(0, 1), gather(data))

    def gathered(data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            raise ValueError(
                "eval_use_gather_object=True gathers from every rank, and ranks of cp read the same batch; drop it"
            )
        with replaced(accelerator, gather=once):
            return gather_for_metrics(data)

    accelerator.prepare_data_loader, accelerator.gather_for_metrics = prepared, gathered


@torch.no_grad()
def whole_predictions(model: nn.Module, mesh: Mesh, loss: Any, logits: Any, tokens: int) -> tuple[Any, Any]:
    """(the mean of the ranks' ``loss``, all tokens' ``logits``) where ranks of cp share sequences of ``tokens``."""
    context = context_of(model)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return context.whole(x) if x.ndim > 1 and x.shape[1] == tokens // context.ranks else x

    if loss is not None:
        loss = compat.all_reduce(loss, "sum", mesh.context_group) / context.ranks
    return loss, None if logits is None else recursively_apply(whole, logits)


@torch.no_grad()
def shard(model: nn.Module, mesh: Mesh, args: TrainingArguments, options: Mapping[str, Any]) -> dict[int, nn.Parameter]:
    """`parallelize` for ``model``, with rank 0's weights. The new parameters by the ids of the ones that they replace.

    As under accelerate's FSDP2, ``bf16=True`` keeps trainable shards in fp32 and gathers them in bf16. A model whose
    weights only rank 0 has loaded (``cpu_ram_efficient_loading``) gets them here.
    """
    _check_model(model)
    given = dict(model.named_parameters(remove_duplicate=False))
    gathers_bf16 = args.bf16 and mesh.spec.dp_shard > 1
    for param in given.values():
        if gathers_bf16 and param.requires_grad and param.is_floating_point():
            param.data = param.data.float()
    options = {"param_dtype": torch.bfloat16 if gathers_bf16 else None, **options}
    weights, buffers = {name: param.detach() for name, param in given.items()}, dict(model.named_buffers())
    parallelize(model, mesh, device=args.device, **options)
    placed = layouts(model)
    done: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(given[name]) not in done:
            whole = _of_first_rank(weights[name], args.device)
            placed[name].own(param.to_local()).copy_(placed[name].cut(whole))
            done[id(given[name])] = param
    now = dict(model.named_buffers())
    for name, buffer in buffers.items():  # without buffers that hold the rank's number
        now[name].copy_(_of_first_rank(buffer, args.device))
    return done


def _of_first_rank(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.empty_like(value, device=device) if value.is_meta else value.to(device, copy=True)
    value = value.contiguous()
    dist.broadcast(value, src=0)
    return value


def _check_model(model: nn.Module) -> None:
    if getattr(model, "is_quantized", False):
        raise ValueError("the model is quantized, and its packed weights cannot be sharded; train it on one process")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"{name} is sharded already (tp_plan or distributed_config); load it whole, GraphTrainer shards it"
            )


def swap_parameters(optimizer: torch.optim.Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer that was made for the whole model update the shards. ``ValueError`` if it has stepped."""
    if optimizer.state:
        raise ValueError("optimizers= has stepped on whole parameters; use a new one, and resume from a checkpoint")
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(param), param) for param in group["params"]]


def join_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Join the groups that transformers makes for parameters of different meshes: checkpoints then have the groups of
    one process, and a graph updates parameters of several meshes at once."""
    place = {id(param): index for index, param in enumerate(model.parameters())}
    joined: list[dict[str, Any]] = []
    meshes: set[Any] = set()
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        own = {param.device_mesh for param in group["params"]}
        alike = joined and options == {n: v for n, v in joined[-1].items() if n != "params"}
        if alike and own and meshes and not own & meshes:  # an empty group, as with LoRA, stays
            joined[-1]["params"] = sorted(joined[-1]["params"] + group["params"], key=lambda param: place[id(param)])
            meshes |= own
        else:
            joined.append(group)
            meshes = own
    optimizer.param_groups[:] = joined


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], max_norm: float, *_: Any, **__: Any) -> torch.Tensor:
    """``clip_grad_norm_`` for shards: the norm is that of the whole gradients."""
    params = [param for param in parameters if param.grad is not None]
    local = {index: param.grad.to_local() for index, param in enumerate(params)}
    clipped, norm = gradients.clip(local, params, max_norm)
    for index, value in clipped.items():
        local[index].copy_(value)
    return norm


def load_converted(model: nn.Module, folder: str, args: TrainingArguments) -> Any:
    """Load the weights that ``from_pretrained`` finds in ``folder``: what ``load_state_dict`` says of them."""
    with plain_ranks(args):  # all ranks read
        found = type(model).from_pretrained(folder, config=model.config)
    return model.load_state_dict(found.state_dict(), strict=False)


@torch.no_grad()
def whole_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, keep: bool) -> dict[str, Any]:
    """The optimizer's ``state_dict`` of one process, on the CPU; all ranks must call. Empty if not ``keep``."""
    state = optimizer.state_dict()
    for index, layout in enumerate(_layouts_of(optimizer, model)):
        slots = dict(state["state"].get(index, {}))  # the optimizer's own stays
        for name, value in slots.items():
            if isinstance(value, torch.Tensor):
                whole = whole_tensor(value, layout)
                slots[name] = whole.cpu() if keep else None
        if slots:
            state["state"][index] = slots
    return state if keep else {}


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Load what `whole_optimizer`, or an optimizer of one process, gave: each rank keeps its part."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {sizes[0]} parameters and this one of {sizes[1]}; build the same"
        )
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    device = next(model.parameters()).device
    for key, layout in zip(keys, _layouts_of(optimizer, model), strict=True):
        slots = dict(saved["state"].get(key, {}))
        for name, value in slots.items():
            if not isinstance(value, torch.Tensor) or name == "step":
                continue
            if value.shape != layout.shape:
                raise ValueError(
                    f"optimizer state {name!r} of shape {list(value.shape)} belongs to a parameter of shape "
                    f"{list(layout.shape)} and cannot be sharded like it; resume on one process or remove optimizer.pt"
                )
            slots[name] = layout.part(value, device)
        if slots:
            saved["state"][key] = slots
    optimizer.load_state_dict(saved)


def _layouts_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Layout]:
    """The layout of each of the optimizer's parameters, in its order."""
    placed = layouts(model)
    by_id = {id(param): placed[name] for name, param in model.named_parameters(remove_duplicate=False)}
    return [by_id[id(param)] for group in optimizer.param_groups for param in group["params"]]
