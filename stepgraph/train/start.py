"""Before a run begins: its folder, its data, its learning rates, and what it reports of its options."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from stepgraph import parallel, passes
from stepgraph.config.build import chosen_chunks
from stepgraph.config.device import memory_bytes
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.costs.memory import peak_bytes
from stepgraph.errors import read_json
from stepgraph.graph.program import StepProgram
from stepgraph.models.transformers import CausalLM
from stepgraph.step import CapturedStep
from stepgraph.train.checkpoint.checkpointer import Checkpointer, resolve
from stepgraph.train.checkpoint.files import step_of
from stepgraph.train.data import (
    DataBundle,
    Loader,
    MixedLoader,
    PackedLoader,
    default_folder,
    open_data,
    open_validation,
    require_one_kind,
    validation_batches,
)
from stepgraph.train.records.folder import REWOUND, died_early, require_unused, status_of
from stepgraph.train.saving import check_export
from stepgraph.train.validation import ValidationSet

#: Where an elastic agent's store has the run folder.
_FOLDER_KEY = "run-folder"


def choose_folder(config: TrainConfig) -> tuple[Path, bool, Path | None]:
    """(the run folder, whether an earlier attempt at this run used it that an elastic agent started or that died before
    its first checkpoint, the run or checkpoint to continue from)."""
    store = parallel.job_store()
    if store is not None and store.check([_FOLDER_KEY]):
        path = Path(store.get(_FOLDER_KEY).decode())
        if (path / REWOUND).exists():
            return path, True, config.resume
        return path, True, path if Checkpointer(path / "checkpoints").latest() is not None else None
    path = config.run_folder()
    dead = died_early(path)
    if not config.resume and not dead:
        require_unused(path)
    return path, dead, None if dead else config.resume


def keep_folder(path: Path) -> None:
    """For the next attempt of an elastic agent: it continues in ``path``. Called once that folder itself says
    whether it rewinds, or an attempt that ends earlier would be followed by one from a wrong checkpoint."""
    if (store := parallel.job_store()) is not None:
        store.set(_FOLDER_KEY, str(path))


def require_work(config: TrainConfig, step: int) -> None:
    """Raise ``ValueError`` where a resumed run has no more steps to do, nor records or an export to write."""
    finished = status_of(config.resumed_run) == "finished"
    if step > config.steps or (step == config.steps and finished and config.export_hf is None):
        raise _nothing_left(config, step)


def require_export(config: TrainConfig, run: Path) -> None:
    """Raise ``ValueError`` where the export at the end of ``run`` cannot be written, or where a resumed run has
    written it and has nothing else to do."""
    if config.export_hf is None:
        return
    try:
        check_export(config.export_hf, run=run)
    except ValueError:
        finished = config.resume is not None and status_of(run) == "finished"
        step = step_of(resolve(config.resume)) if finished and config.export_hf == _saved(config).export_hf else -1
        if step >= config.steps:
            raise _nothing_left(config, step, exported=True) from None
        raise


def _nothing_left(config: TrainConfig, step: int, exported: bool = False) -> ValueError:
    option = "--steps" if config.epochs is None else "--epochs"
    done, more = f"{config.resume} has done {step} of {config.steps} steps", f"ask for more with {option}"
    if exported:
        done, more = f"{done} and its export is in {config.export_hf}", f"{more} and a new --export-hf"
    return ValueError(f"nothing is left to do: {done}; {more}")


def _saved(config: TrainConfig) -> TrainConfig:
    return read_json(config.resumed_run / "config.json", TrainConfig.from_json)


def open_fitting_data(config: TrainConfig) -> DataBundle:
    """The data of a run. Raises ``ValueError`` where the tokenizer has more tokens than the model."""
    data = open_data(config.data, config.tokenizer, config.fields, config.seq_len)
    given, size, weights = data.tokenizer.vocab_size, config.model.vocab_size, config.init_from_hf
    if given > size:
        fix = f"try --model.vocab-size {-(-given // 64) * 64}"
        if weights is not None or config.resume is not None:
            fix = "use the one of these weights, or resize their embeddings first"
        raise ValueError(f"the tokenizer has {given} tokens, the model {size}: {fix}")
    if weights is not None and config.tokenizer == "bytes" and size > 2 * given:
        own = f"theirs is given by --tokenizer {weights / 'tokenizer.json'}"
        warnings.warn(f"text is read as bytes, {given} tokens, and the weights have {size}: {own}", stacklevel=2)
    return data


def with_document_mask(config: TrainConfig, chat: bool) -> TrainConfig:
    """``config`` with ``document_mask`` on where it is auto and the data is conversations (``chat``); of DPO with the
    reference that it has by default, which a resumed run reads too."""
    if config.loss == "dpo" and config.lora is None and config.reference is None:
        config = dataclasses.replace(config, reference=config.init_from_hf)
    return dataclasses.replace(config, document_mask="on") if chat and config.document_mask == "auto" else config


def open_batches(
    config: TrainConfig, data: DataBundle, mesh: parallel.Mesh | None
) -> tuple[Loader, list[ValidationSet]]:
    """What this rank trains on and what it validates on; ranks that differ in tp, ep or pp alone read the same."""
    sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len, "positions": config.document_mask == "on"}
    if mesh is not None:
        sizes |= {"rank": mesh.dp_place, "world_size": mesh.spec.dp}
    sets = open_validation(config.val_data, config.fields) if config.val_data else data.parts
    require_one_kind([data.source, *(part.source for part in sets)])
    validation = [
        ValidationSet(p.name, p.share, validation_batches(p.source, data.tokenizer, n=config.val_batches, **sizes))
        for p in sets
    ]
    sizes["batch_size"] *= config.accumulate
    sizes |= {"seed": config.seed, "cache": config.data_cache or default_folder()}
    if len(data.parts) > 1:
        return MixedLoader(list(data.parts), data.tokenizer, **sizes), validation
    return PackedLoader(data.source, data.tokenizer, **sizes), validation


def with_steps_of_epochs(config: TrainConfig, loader: Loader) -> tuple[TrainConfig, str]:
    """``config`` with the steps of its epochs, rounded up to whole ones, if it has epochs; and a line about them. A
    warm-up that is the preset's, for long runs, is shortened.

    Raises ``ValueError``, in one line, for data without epochs, and for options that do not go with these steps.
    """
    if config.epochs is None:
        return config, ""
    if isinstance(loader, MixedLoader):
        raise ValueError(f"epochs={config.epochs:g}, but each source of a mixture has epochs of its own: use --steps")
    rows, per_step = loader.rows_of_an_epoch(), config.tokens_per_step // config.seq_len
    steps = math.ceil(config.epochs * rows / per_step)
    shorter = config.warmup_steps >= steps and config.warmup_steps == _preset_of(config).warmup_steps
    warmup = steps // 10 if shorter else config.warmup_steps
    config = dataclasses.replace(config, steps=steps, warmup_steps=warmup)
    config.validate_length()
    return config, f"epochs {config.epochs:g}: {rows:,} rows each, {per_step} per step, {steps:,} steps"


def options_lines(config: TrainConfig, *, resumed: bool) -> str:
    """The options that differ from the preset's, and what a resumed run does otherwise than before, whose
    ``config.json`` is still the old one; the new one has all options."""
    given = [f"{name}={value}" for name, (_, value) in config.changes(_preset_of(config)).items()]
    line = f"config {config.preset}: {' '.join(given) or 'its own options'}"
    if not resumed:
        return line
    changed = config.changes(_saved(config))
    changed.pop("init_from_hf", None)  # the checkpoint has the weights
    changed = [f"{name} {was} -> {now}" for name, (was, now) in changed.items()]
    return f"{line}\noptions changed since: {', '.join(changed) or 'none'}"


def graph_line(step: CapturedStep) -> str:
    """How long the capture took, and how many nodes there are after passes."""
    counts = (f"{phase} {n:,}" for phase, n in step.program.count_by_phase().items())
    return f"graph captured in {step.program.capture_s:.1f} s; nodes after passes: {', '.join(counts)}"


def pass_lines(config: TrainConfig, reports: Sequence[passes.PassReport], device: torch.device) -> str:
    """How many passes changed the step, and the reports of passes that an option asked for and that changed nothing,
    with the reason; with ``--verbose`` the whole report."""
    if config.verbose:
        return passes.format_report(reports)
    asked = passes.asked_for(config, _preset_of(config), device.type)
    changed = sum(report.acted for report in reports)
    idle = [r for r in reports if r.name in asked and not r.acted]
    lines = [line for r in idle for line in (r.line(), *(f"   {note}" for note in r.notes if r.matched))]
    return "\n".join([f"{changed} of {len(reports)} passes changed the graph (passes.txt)", *lines])


def model_line(config: TrainConfig, params: int) -> str:
    """The size and form of the model."""
    size = f"{params:,} parameters"
    if hasattr(config.model, "moe"):
        size += f", {config.model.num_params(active=True):,} of them active per token"
    return f"model {config.preset}: {size}; {config.precision}"


def quantized_words(config: TrainConfig, model: CausalLM) -> str:
    """How many weights are quantized, their size before and after, and which are left; empty if none are."""
    if config.quantize is None:
        return ""
    experts = sum(len(weight.shape) == 3 for weight in model.quantized.values())
    layers = f"{len(model.quantized) - experts} frozen layers" + (
        f" and {experts} weights of experts" if experts else ""
    )
    was, now = (sum(sizes) / 2**20 for sizes in zip(*(w.sizes() for w in model.quantized.values()), strict=True))
    stays = f"; {model.unquantized}" if model.unquantized else ""
    return f"; {layers} in {config.quantize}, {now:,.1f} MiB instead of {was:,.1f}{stays}"


def mesh_line(config: TrainConfig) -> str:
    """The ranks of a run, and what a step is made of."""
    spec = config.mesh_spec
    ranks = "one process" if spec is None else f"{spec} of {spec.size} ranks"
    chunks = chosen_chunks(config)
    return f"mesh {ranks}; {config.batch_text}, {config.tokens_per_step:,} tokens per step" + (
        f"\n{chunks.line()}" if chunks else ""
    )


def memory_line(program: StepProgram, device: torch.device) -> str:
    """The forecast of this rank's peak."""
    peak, total = peak_bytes(program) / 2**30, memory_bytes(device) / 2**30
    return f"memory forecast: a peak of {peak:.1f} GiB of {total:.1f} GiB"


def _preset_of(config: TrainConfig) -> TrainConfig:
    return PRESETS[config.preset]() if config.preset in PRESETS else TrainConfig()


def lr_at(step: int, config: TrainConfig) -> float:
    """Learning rate of update ``step``, counted from 0 to ``config.steps - 1``.

    Warm-up: ``lr * (step + 1) / (warmup_steps + 1)``, never 0, so that no update is wasted and ``step ==
    warmup_steps`` is the first at the peak. With ``p`` the share of the decay that is done, in [0, 1), the rest is

    - cosine: ``low + (lr - low) * (1 + cos(pi * p)) / 2``.
      Source: Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, eq. 5, without restarts.
    - wsd (warm-up, stable, decay): ``lr``, then over the last ``decay_steps`` ``low + (lr - low) * (1 - sqrt(p))``.
      Source: Hu et al. 2024, "MiniCPM", arXiv 2404.06395, for the three phases; Hägele et al. 2024, "Scaling Laws and
      Compute-Optimal Training Beyond Fixed Training Durations", arXiv 2405.18392, for the shape of the decay.
    - constant: ``lr``.

    with ``low = min_lr_ratio * lr``, which step ``config.steps`` would be the first to reach.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    low = config.min_lr_ratio * config.lr
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
        return low + (config.lr - low) * (1 + math.cos(math.pi * done)) / 2
    if config.schedule == "wsd":
        done = max(0.0, (step - (config.steps - config.decay_steps)) / config.decay_steps)
        return low + (config.lr - low) * (1 - math.sqrt(done))
    return config.lr
