"""A run's weights: when it saves them to checkpoints, which one it starts from, and ``stepgraph export``, which writes
them with the tokenizer in one folder for Hugging Face's libraries."""

import contextlib
import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph import parallel
from stepgraph.config import build
from stepgraph.config.command_line import first_word, parse
from stepgraph.config.commands import ExportOptions
from stepgraph.config.device import pick_device, require_memory
from stepgraph.config.files import run_config
from stepgraph.config.hf_weights import save_hf
from stepgraph.config.train import TrainConfig
from stepgraph.errors import write_text
from stepgraph.models import FAMILIES, family_of
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.checkpoint.background import BackgroundSaves
from stepgraph.train.checkpoint.checkpointer import Checkpointer, loader_state, resolve
from stepgraph.train.data.tokenizer import TokenizerFiles


class Saving:
    """The checkpoints of the run in ``path``. ``saved_step``: of the newest that this process wrote or began with."""

    def __init__(self, config: TrainConfig, path: Path, mesh: parallel.Mesh | None, ranks: Ranks, device: torch.device):
        layout = None if mesh is None else str(mesh.spec)
        self.config, self.path, self.ranks = config, path, ranks
        self.checkpointer = Checkpointer(
            path / "checkpoints", keep=config.keep_checkpoints, keep_every=config.keep_every, mesh=layout
        )
        self.saved_step: int | None = None
        self.notes: list[str] = []
        behind = config.save == "behind" or (config.save == "auto" and device.type == "cuda")
        self.background = BackgroundSaves(self.checkpointer, parallel.gloo_group()) if behind else None

    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Continue from the checkpoint ``path``, or that run's newest: on any mesh with the row that comes next."""
        groups = build.param_groups(state["optimizer"])
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        path = self.ranks.first(lambda: resolve(path))
        if self.checkpointer.is_of_this_mesh(path):
            self.checkpointer.load(path, state)
        else:
            self.checkpointer.load(path, {k: v for k, v in state.items() if k != "loader"}, rng=False)
            self.ranks.each(lambda: state["loader"].load_state_dict(loader_state(path)))
        if not {"step", "tokens"} <= state["trainer"].keys():
            raise ValueError(f"checkpoint {path} lacks the steps and tokens of its run; use an earlier one")
        for group, given in zip(build.param_groups(state["optimizer"]), options, strict=True):
            group.update(given)  # --weight-decay and the like may be changed on --resume

    def prepare(self, step: int, state: dict[str, Any]) -> None:
        """Let a thread take the memory of a background save, if one is due after more than ``step`` updates."""
        every = self.config.checkpoint_every
        if self.background and every and (step // every + 1) * every < self.config.steps:
            self.background.prepare(state)

    def save(self, step: int, state: dict[str, Any], *, last: bool, evict: bool = True) -> float:
        """Save the state after ``step`` updates, unless that is done; the ``last`` is waited for, and so is the one
        before. ``evict``: older checkpoints than the ones to keep are deleted. The seconds waited. Raises OSError."""
        began = time.perf_counter()
        if last:
            self.finish()
        if step == self.saved_step:
            return time.perf_counter() - began
        if self.background and not last:
            try:
                self.background.begin(step, state, evict)
            except OSError:  # of the checkpoint before
                self.saved_step = None
                raise
            except MemoryError as failure:  # on all ranks
                self.background = None
                self.notes.append(f"warning: checkpoints are waited for: {failure}")
        if self.background is None or last:
            self.checkpointer.save(step, state, evict)
        self.saved_step = step
        return time.perf_counter() - began

    def written(self) -> list[str]:
        """What to say of checkpoints since. Raises OSError, in one line, where one could not be written."""
        notes, self.notes = self.notes, []
        try:
            return notes + (self.background.check() if self.background else [])
        except OSError:
            self.saved_step = None
            raise

    def finish(self) -> None:
        """Wait for the save in progress. If it fails, earlier checkpoints are unchanged."""
        if self.background:
            try:
                self.background.finish()
            except OSError:
                self.saved_step = None


#: Checkpoints that are tried while a run that saves often deletes them.
_TRIES = 10


def load_trained(folder: Path, config: TrainConfig, device: str = "cpu") -> tuple[nn.Module, int]:
    """The model of the run ``folder``, or of ``RUN/checkpoints/step-N``, and the step of its checkpoint.

    ``config``: from `run_config`. ``device``: auto, cpu or cuda. The model is in evaluation mode, in the run's dtypes.
    Raises ``ValueError`` if there is no usable checkpoint.
    """
    rounds = config.precision == "bf16" and config.mesh_spec is not None and config.lora is None  # shards are fp32
    alone = dataclasses.replace(config, mesh=None, precision="fp32" if rounds else config.precision)
    require_memory(alone, there := pick_device(device))
    model = build.empty_model(alone, there)
    model.init_weights(parts={})  # only buffers that no checkpoint holds, such as RoPE tables
    done = {"step": 0}
    for left in reversed(range(_TRIES)):
        path = resolve(folder)
        try:
            Checkpointer(path.parent).load(path, {"model": model, "trainer": done}, rng=False)
            break
        except (ValueError, OSError):
            if path.is_dir() or not left:
                raise  # otherwise the run, which still trains, has deleted this checkpoint and has a newer one
    if rounds:  # gathered in bf16
        for param in model.parameters():
            param.data = param.data.to(torch.bfloat16)
    return model.eval(), done["step"]


#: In the folder of an export that is not done: the run that writes it.
CLAIM = ".unfinished-export"


def main(argv: list[str]) -> int:
    """Runs ``stepgraph export ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    name, words = first_word(argv, "export takes a run folder first: write stepgraph export RUN --out FOLDER", "")
    (options,) = parse(words, "stepgraph export RUN", ExportOptions(), description=ExportOptions.__doc__)
    if options.out is None:
        raise ValueError("export needs a folder to write: add --out FOLDER")
    run = Path(name)
    config = run_config(run)
    family = family_of(config.model)
    if family.hugging_face is None:
        known = ", ".join(f.hugging_face.title for f in FAMILIES if f.hugging_face)
        raise ValueError(f"{run} is a model of {family.name}, and Hugging Face has forms for {known} only")
    family.hugging_face.write_config(config.model, torch.float32)  # refused before anything is read
    check_export(options.out, "out", run)
    TokenizerFiles(config.tokenizer)
    model, step = load_trained(run, config)
    try:
        export(model, options.out, config.tokenizer, run)
        (options.out / CLAIM).unlink()
    except OSError as error:
        raise ValueError(f"the export failed: {error}") from error
    print(f"model of step {step} and its tokenizer for Hugging Face in {options.out}")
    return 0


def check_export(folder: Path, option: str = "export_hf", run: Path | None = None) -> None:
    """Raise ``ValueError`` where an export to ``folder``, which ``option`` names, would overwrite something else than
    an export of ``run`` that did not end, or could not be written."""
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{option}={folder} is a file: use a new folder")
        claimed = run is not None and (folder / CLAIM).is_file() and (folder / CLAIM).read_text() == _claim(run)
        if folder.is_dir() and any(folder.iterdir()) and not claimed:
            raise ValueError(f"{option}={folder} is not empty: use a new folder")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise ValueError(f"{option}={folder} cannot be looked at: {error.strerror}; use another folder") from error
    if not there.is_dir():
        raise ValueError(f"{option}={folder} lies in {there}, which is a file: use a new folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option}={folder} cannot be written, {there} is read-only: use another folder")


def export(model: nn.Module, folder: Path, tokenizer: str, run: Path) -> None:
    """Write ``model`` of ``run`` and the tokenizer that ``--tokenizer`` names to ``folder``, as `check_export` allows.
    All ranks of a parallel model call this function. A failure leaves no file there. `CLAIM` stays in the folder until
    the caller removes it, so that a run killed before then writes its export again.

    Raises as `save_hf` does, and OSError for tokenizer files that cannot be copied.
    """
    files, ranks = TokenizerFiles(tokenizer), Ranks()

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CLAIM, _claim(run))
        _empty(folder, CLAIM)  # of an attempt that was killed, maybe after its last file

    try:
        ranks.first(begin)
        ranks.first(lambda: files.write(folder))
        save_hf(model, folder, tokens={"bos_token_id": files.bos_id, "eos_token_id": files.eos_id})
    except OSError:
        with contextlib.suppress(OSError):
            ranks.first(lambda: _empty(folder))  # the same command can be given again
        raise


def _claim(run: Path) -> str:
    return f"{run.resolve()}\n"


def _empty(folder: Path, keep: str = "") -> None:
    for file in folder.iterdir():
        if file.is_dir():  # the adapter
            shutil.rmtree(file)
        elif file.name != keep:
            file.unlink()


def export_saved(model: nn.Module, config: TrainConfig, run: Path, step: int) -> None:
    """`export` at the end of ``run``, whose checkpoint of ``step`` is written: OSError says how to do without it."""
    try:
        # Another run may have written there since.
        Ranks().first(lambda: check_export(config.export_hf, run=run))
        export(model, config.export_hf, config.tokenizer, run)
    except (OSError, ValueError) as error:
        raise OSError(
            f"the export failed: {error}; step {step} is saved: stepgraph export {run} --out FOLDER"
        ) from error
