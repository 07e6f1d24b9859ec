"""The options of a training run: one frozen dataclass, its checks, and its JSON form.

Every field's docstring is the text that ``stepgraph train --help`` prints for it, so each is one line.
"""

import dataclasses
import datetime
import json
import math
import os
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stepgraph import options
from stepgraph.config.command_line import run_of
from stepgraph.errors import unknown_name
from stepgraph.models import FAMILIES, family_named, family_of, llama3_debug
from stepgraph.models.loss import PAIR, PAIR_TOKENS
from stepgraph.models.transformers import CausalLMConfig, lora_options, takes_positions
from stepgraph.parallel import SCHEDULES, MeshSpec, check_schedule
from stepgraph.parallel.context import form_of
from stepgraph.parallel.pipeline.layout import check_blocks, check_split
from stepgraph.passes.options import check_step

#: The shape of a model of any family; the command line has an option for each field of the one that is given.
ModelConfig = typing.Union[tuple(family.config for family in FAMILIES)]  # noqa: UP007  # pyrefly: ignore[invalid-annotation]


#: Which of a process's steps a profiled run runs node by node, before a CUDA graph is recorded: kernels are chosen in
#: the first.
PLAIN_STEP = 2


@dataclass(frozen=True)
class TrainConfig(
    options.RecordOptions,  # the last base's fields come first
    options.StepOptions,
    options.LaunchOptions,
    options.MeshOptions,
    options.DeviceOptions,
    options.OptimizerOptions,
    options.BatchOptions,
    options.LossOptions,
    options.DataOptions,
):
    """Train a language model from one captured step graph."""

    model: ModelConfig = dataclasses.field(default_factory=llama3_debug)
    """Shape of the model."""

    preset: str = "custom"
    """Name of the preset that the configuration started from."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer update sees, on all ranks together."""
        return self.accumulate * self.batch_size * self.seq_len * (self.mesh_spec.dp if self.mesh_spec else 1)

    @property
    def batch_text(self) -> str:
        """What a step takes, such as ``2 microbatches x 8 x 256 tokens per data-parallel rank``."""
        several = "" if self.accumulate == 1 else "es"
        per = " per data-parallel rank" if self.mesh_spec else ""
        return f"{self.accumulate} microbatch{several} x {self.batch_size} x {self.seq_len:,} tokens{per}"

    @property
    def products_dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def mesh_spec(self) -> MeshSpec | None:
        """``mesh`` as sizes."""
        return None if self.mesh is None else MeshSpec.parse(self.mesh)

    @property
    def fields(self) -> str:
        """What the data is read for: ``text_field``, or preference pairs."""
        return PAIR if self.loss == "dpo" else self.text_field

    @property
    def resumed_run(self) -> Path | None:
        """The run folder that ``resume`` is, or whose checkpoint it is."""
        return run_of(self.resume) if self.resume is not None else None

    def run_folder(self) -> Path:
        """``resumed_run``, else ``out``, else ``runs/PRESET-UTC_TIME`` of this microsecond: call it once a run."""
        now = datetime.datetime.now(datetime.UTC)
        return self.resumed_run or self.out or Path("runs") / f"{self.preset}-{now:%Y%m%dT%H%M%S.%fZ}"

    def validate(self) -> None:
        """Raises ValueError, in one line, for the first option that cannot be right. Reads no data."""
        for name in (
            *("seq_len", "batch_size", "accumulate", "steps", "lr", "eps", "log_every", "val_batches"),
            *("keep_checkpoints", "comm_timeout", "first_step_timeout", "max_skipped"),
            "expert_capacity",
        ):
            self._require(name, lambda value: value > 0, "above 0")
        if self.expert_chunks != "auto":
            self._require("expert_chunks", lambda value: value > 0, "above 0, or auto")
        for name in (
            *("warmup_steps", "weight_decay", "val_every", "checkpoint_every", "keep_every"),
            *("sample_every", "max_restarts"),
        ):
            self._require(name, lambda value: value >= 0, "0 or more")
        self._require("seed", lambda value: 0 <= value < 1 << 63, "0 or more, and below 2^63")
        self._require("min_lr_ratio", lambda value: 0 <= value <= 1, "in [0, 1]")
        self._require("decay_fraction", lambda value: 0 < value <= 1, "in (0, 1]")
        self._require("betas", lambda value: all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)")
        if self.max_grad_norm is not None:
            self._require("max_grad_norm", lambda value: value > 0, "above 0, or None for no clipping")
        for name, allowed in options.choices(*options.PARTS).items():
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), (str(value) for value in allowed if value is not None))
        if self.keep_every and (not self.checkpoint_every or self.keep_every % self.checkpoint_every):
            raise ValueError(f"keep_every={self.keep_every} must be a multiple of checkpoint_every="
                             f"{self.checkpoint_every}, the steps that have checkpoints")  # fmt: skip
        if self.epochs is None:
            self.validate_length()
        else:
            self._require("epochs", lambda value: value > 0, "above 0")
        longest = family_of(self.model).longest(self.model)
        if longest is not None and self.seq_len > longest:
            raise ValueError(f"seq_len={self.seq_len} exceeds model.max_seq_len={longest}: try --seq-len {longest}")
        self._validate_loss()
        _check_mesh(self)
        if self.optimizer != "adamw" and self.precision == "bf16" and self.mesh is None:
            raise ValueError("optimizer=muon keeps no master weights: try --precision bf16-autocast")
        self._validate_folders()
        if self.memory_snapshot and self.device == "cpu":
            raise ValueError("memory_snapshot records a GPU's allocations and device=cpu: drop one of them")
        mesh = self.mesh_spec
        check_step(self, tp=mesh.tp if mesh else 1, dp_shard=mesh.dp_shard if mesh else 1)

    def validate_length(self) -> None:
        """Raises ValueError for options that do not go with ``steps``, which a run of ``epochs`` counts first."""
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be below steps={self.steps}: "
                f"try --warmup-steps {self.steps // 10}"
            )
        if self.profile is not None and parse_steps(self.profile)[1] > self.steps + 1:
            raise ValueError(f"profile={self.profile} goes beyond steps={self.steps}: use earlier steps")
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            largest = math.floor(100 * (self.steps - self.warmup_steps) / self.steps) / 100
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and a decay of {self.decay_steps} steps "
                f"(decay_fraction={self.decay_fraction:g}) exceed steps={self.steps}: try --decay-fraction {largest:g}"
            )

    def _validate_loss(self) -> None:
        self._require("beta", lambda value: value > 0, "above 0")
        self._require("label_smoothing", lambda value: 0 <= value < 0.5, "in [0, 0.5)")
        if self.loss != "dpo":
            if self.reference is not None:
                raise ValueError(f"reference={self.reference} is for --loss dpo: add it, or drop the reference")
            return
        if (spec := self.mesh_spec) is not None and any(getattr(spec, axis) > 1 for axis in ("tp", "pp", "cp", "ep")):
            raise ValueError(
                f"loss=dpo supports the axes ddp, fsdp and hsdp, and not the others of mesh={self.mesh}: drop them"
            )
        if self.document_mask == "off":
            raise ValueError("loss=dpo packs both answers into one row, and document_mask=off would let each attend to "
                             "the other: drop it")  # fmt: skip
        if self.text_field != "text":
            raise ValueError(f"text_field={self.text_field} is a field of text, and loss=dpo reads pairs: drop it")
        if self.seq_len < 2 * PAIR_TOKENS:
            raise ValueError(f"seq_len={self.seq_len} is too short for a pair: try --seq-len {2 * PAIR_TOKENS} or more")
        if self.reference is None and self.init_from_hf is None and self.resume is None:
            raise ValueError("loss=dpo starts from a trained model and there is none: add --init-from-hf FOLDER")
        if self.reference is not None and not self.reference.is_dir():
            raise ValueError(f"reference={self.reference} is not a folder: use one with safetensors files")

    @property
    def pipeline_schedule(self) -> str:
        """``pipeline``, or the default schedule."""
        return self.pipeline or "1f1b"

    @property
    def stage_starts(self) -> tuple[int, ...] | None:
        """``split`` as numbers."""
        if self.split is None:
            return None
        if not re.fullmatch(r"\d+(,\d+)*", self.split):
            raise ValueError(f"split={self.split} must be the first block of each stage, as in 0,9,17,25")
        return tuple(map(int, self.split.split(",")))

    def _validate_folders(self) -> None:
        if self.resume is not None:
            if self.out is not None and self.out != self.resumed_run:
                raise ValueError("out and resume are both given: a resumed run continues in its own folder; drop --out")
            if self.init_from_hf is not None and any((self.resumed_run / "checkpoints").glob("step-*")):
                raise ValueError("init_from_hf and resume are both given: a resumed run has its weights; drop one")
            if not (self.resumed_run / "config.json").is_file():
                raise ValueError(f"resume={self.resume} is not a run folder (no config.json): use the folder of a run")
        saved = Path(self.saved_steps)
        if self.saved_steps not in ("auto", "off") and saved.exists() and not saved.is_dir():
            raise ValueError(f"saved_steps={saved} is a file: use a folder of saved steps")
        if self.init_from_hf is not None and not self.init_from_hf.is_dir():
            hub = "use a folder with safetensors files, or OWNER/NAME of a model on the Hub"
            raise ValueError(f"init_from_hf={self.init_from_hf} is not a folder: {hub}")
        for name in ("init_from_hf", "export_hf"):
            if getattr(self, name) is not None and family_of(self.model).hugging_face is None:
                known = ", ".join(f.hugging_face.title for f in FAMILIES if f.hugging_face)
                raise ValueError(f"{name} works for {known} models only: choose a preset of theirs or drop it")
        if self.export_hf is not None:  # refuses now what could not be written at the end
            if self.out is not None and self.out.resolve() == self.export_hf.resolve():
                raise ValueError(f"out={self.out} and export_hf={self.export_hf} are one folder, and both have a "
                                 "config.json: use two")  # fmt: skip
            family_of(self.model).hugging_face.write_config(self.model, torch.float32)
        if isinstance(self.model, CausalLMConfig):
            self._validate_transformers()
        elif self.lora is not None or self.quantize is not None:
            given = f"quantize={self.quantize}" if self.lora is None else f"lora={self.lora}"
            raise ValueError(f"{given} needs a model of transformers: use --init-from-hf FOLDER, and no PRESET")

    def _validate_transformers(self) -> None:
        """What a model of transformers does not have here."""
        folder = self.model.folder
        if self.init_from_hf is not None and self.init_from_hf.resolve() != Path(folder).resolve():
            raise ValueError(f"init_from_hf={self.init_from_hf} and model.folder={folder} are two models: drop one")
        if self.lora is not None:
            lora_options(self.lora)
            if self.optimizer != "adamw":
                raise ValueError(f"optimizer={self.optimizer} and lora are both given: adapters are trained by adamw")
        elif self.quantize is not None:
            raise ValueError(f"quantize={self.quantize} is for frozen weights, and all are trained: add --lora r=16")
        if self.document_mask == "on" and not takes_positions(folder):
            raise ValueError(f"document_mask=on keeps documents apart by positions, which the model of {folder} does "
                             "not take: use --document-mask off")  # fmt: skip

    @property
    def decay_steps(self) -> int:
        """Steps of the decay that ends the wsd schedule."""
        return max(1, round(self.decay_fraction * self.steps))

    def _require(self, name: str, holds: typing.Callable[[Any], bool], allowed: str) -> None:
        value = getattr(self, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"{name}={value} must be finite, and {allowed}")
        if not holds(value):
            raise ValueError(f"{name}={value} must be {allowed}")

    def changes(self, base: "TrainConfig") -> dict[str, tuple[Any, Any]]:
        """Option -> its value in ``base`` and here, for the ones that differ; a model's as ``model.dim``. Which folder
        the run has is not a difference."""
        found = options.differences(base, self)
        return {name: pair for name, pair in found.items() if name not in ("out", "resume", "preset")}

    def to_json(self) -> str:
        """The configuration as a JSON object, paths as they were given; ``model.family`` names the family of models."""
        values = dataclasses.asdict(self)
        values["model"] = {"family": family_of(self.model).name} | values["model"]
        return json.dumps(values, indent=2, default=os.fspath, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """The configuration that ``to_json`` wrote. Raises ValueError for text it cannot have written."""
        values = json.loads(text)
        if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
            raise ValueError("not a run's configuration: it must be a JSON object with a model in it")
        model = dict(values["model"])
        if model.get("attention") == "sdpa":  # Llama had the option, with this default, until 0.2.0
            del model["attention"]
        if values.get("grouped") in ("auto", "torch"):  # `--grouped` was an option until 0.2.0
            del values["grouped"]
        family = family_named(str(model.pop("family", None)))
        values = {"loss_rows": "all"} | values  # which runs of before that option did
        return decode(cls, values | {"model": decode(family.config, model, "model")}, "configuration")


def parse_steps(text: str) -> tuple[int, int]:
    """``10:13`` as (10, 13): from step 10 up to but not with 13. Raises ``ValueError`` for anything else."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, end = map(int, found.groups()) if found else (0, 0)
    if not PLAIN_STEP < first < end:
        least = PLAIN_STEP + 1
        raise ValueError(f"profile={text} is not a range of steps from {least} or later: write 10:13 for 10, 11 and 12")
    return first, end


#: What options are about, and how a run gets it.
_STAGES = "pipeline stages: add pp=2 to --mesh"
_EXPERTS = "expert parallelism: add ep=2 to the mesh"
_RANKS = "a mesh: add --mesh"


def _check_mesh(config: TrainConfig) -> None:
    """Raises ValueError, in one line, where a `TrainConfig`'s mesh and options about ranks do not go together."""
    if config.nproc is not None and config.nproc < 1:
        raise ValueError(f"nproc={config.nproc} must be above 0")
    if config.max_restarts and config.nproc is None:
        raise ValueError(
            f"max_restarts={config.max_restarts} restarts the ranks of --nproc: add --nproc, or pass it to torchrun"
        )
    spec = config.mesh_spec
    idle = {  # option -> (its value that asks for nothing, whether there is what it is about, that and the fix)
        **dict.fromkeys(("pipeline", "split"), (None, spec and spec.pp > 1, _STAGES)),
        "stage_sends": ("point-to-point", spec and spec.pp > 1, _STAGES),
        "expert_chunks": (1, spec and spec.ep > 1, _EXPERTS),
        "expert_exchange": ("collectives", spec and spec.ep > 1, _EXPERTS),
        "context": ("auto", spec and spec.cp > 1, "context parallelism: add cp=2 to the mesh"),
        "reshard": ("auto", spec, _RANKS),
        "reduce_dtype": ("fp32", spec, _RANKS),
    }
    for name, (plain, there, about) in idle.items():
        if getattr(config, name) != plain and not there:
            raise ValueError(f"{name}={getattr(config, name)} needs {about}, or leave it out")
    if spec is None:
        if config.nproc not in (None, 1):
            raise ValueError(f"nproc={config.nproc} has no mesh: add --mesh fsdp={config.nproc}")
        return
    if config.nproc is not None:
        spec.check_world(config.nproc)
    if isinstance(config.model, CausalLMConfig) and spec.cp * spec.tp * spec.pp * spec.ep > 1:
        raise ValueError(f"mesh={config.mesh}: the model of {config.model.folder}, which is transformers' own, "
                         "supports the axes fsdp, ddp and hsdp; drop the others")  # fmt: skip
    if config.expert_chunks != "auto" and config.expert_chunks > (
        tokens := config.batch_size * config.seq_len // spec.tp
    ):
        raise ValueError(f"expert_chunks={config.expert_chunks} is above the {tokens} tokens of a microbatch; try 2")
    _check_pipeline(config, spec)
    sizes = family_of(config.model).tp_sizes
    spec.check_divides({name: getattr(config.model, name) for name in sizes} | {"seq_len": config.seq_len})
    _check_context(config, spec)
    if spec.ep > 1:
        if not hasattr(config.model, "moe"):
            raise ValueError(f"mesh {spec} has ep and the model has no experts; drop ep={spec.ep}")
        spec.check_divides({"model.moe.n_experts": config.model.moe.n_experts}, "ep")


def _check_context(config: TrainConfig, spec: MeshSpec) -> None:
    """Ranks of cp share sequences, and by ulysses heads, of which a rank of tp has a part."""
    if spec.cp == 1:
        return
    heads = config.model.n_heads
    kv_heads = getattr(config.model, "n_kv_heads", heads)
    if form_of(heads // spec.tp, kv_heads // spec.tp, spec.cp, config.context) == "gather":
        parts = spec.cp * math.lcm(2, spec.tp)
        if config.seq_len % parts:
            raise ValueError(
                f"context=gather over {spec} cuts sequences into {parts} parts, which do not divide "
                f"seq_len={config.seq_len}; try seq_len={config.seq_len // parts * parts or parts}"
            )
    else:
        whole = {"seq_len": config.seq_len, "n_heads": heads}
        whole |= {} if spec.cp % (kv_heads // spec.tp) == 0 else {"n_kv_heads": kv_heads}
        spec.check_divides({f"{n} / tp" if spec.tp > 1 else n: size // spec.tp for n, size in whole.items()}, "cp")
    if spec.pp > 1:
        raise ValueError(f"mesh {spec} combines pp and cp, which is not tested: drop one")


def _check_pipeline(config: TrainConfig, spec: MeshSpec) -> None:
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


def decode(hint: Any, value: Any, where: str) -> Any:
    """``value`` from JSON as the type ``hint``; ``where`` names it in errors.

    Raises ``ValueError``, in one line, for a value of another type, a name that is not known, and one that is missing.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(value):  # the model, decoded already: its class depends on the family
        return value
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        if any(typing.get_origin(arg) is Literal and value in typing.get_args(arg) for arg in args):
            return value
        return decode(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list):
        items = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(items) == len(value):
            return tuple(decode(item, part, where) for item, part in zip(items, value, strict=True))
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (bool, int, str) and type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r} in a run's configuration must be {_allowed(hint)}")


def _allowed(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
    return "str" if hint is Path else getattr(hint, "__name__", str(hint))


def _dataclass(hint: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}={value!r} in a run's configuration must be an object")
    hints = typing.get_type_hints(hint)
    names = [field.name for field in dataclasses.fields(hint) if field.init]
    for name in value:
        if name not in names:
            raise unknown_name(f"name in the {where} of a run", name, names)
    if missing := [name for name in names if name not in value]:
        raise ValueError(
            f"the {where} of a run lacks {', '.join(missing)}: provide all of it, or use the stepgraph that wrote it"
        )
    return hint(**{name: decode(hints[name], value[name], name) for name in names})
