"""A trained model for Hugging Face's libraries, its weights and tokenizer in one folder, and ``stepgraph export``."""

import contextlib
import os
import shutil
from pathlib import Path

import torch
from torch import nn

from stepgraph.config.command_line import first_word, parse
from stepgraph.config.commands import ExportOptions
from stepgraph.config.files import run_config
from stepgraph.config.hf_weights import save_hf
from stepgraph.config.train import TrainConfig
from stepgraph.errors import write_text
from stepgraph.models import FAMILIES, family_of
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.data.tokenizer import TokenizerFiles
from stepgraph.train.saving import load_trained

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
            raise ValueError(f"{option}={folder} is a file: give a new folder")
        claimed = run is not None and (folder / CLAIM).is_file() and (folder / CLAIM).read_text() == _claim(run)
        if folder.is_dir() and any(folder.iterdir()) and not claimed:
            raise ValueError(f"{option}={folder} is not empty: give a new folder")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise ValueError(f"{option}={folder} cannot be looked at: {error.strerror}; give another folder") from error
    if not there.is_dir():
        raise ValueError(f"{option}={folder} lies in {there}, which is a file: give a new folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option}={folder} cannot be written, {there} is read-only: give another folder")


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
