"""Checkpoints of a training run that survive a crash at any moment and resume bitwise.

On disk, ``RUN/checkpoints/step-00000100/`` holds

    .metadata, __0_0.distcp   model and optimizer tensors by torch.distributed.checkpoint (DCP), one file per rank
    state.json                optimizer layout and options, schedule, trainer
    rank-00000.json           random number streams and data position, one file per rank
    manifest.json             format, step, versions, the model's tensors, each file's size and SHA-256

**A crash** (kill -9, power cut) leaves the earlier checkpoints intact. A checkpoint is written to a temporary folder
beside them, every file and folder is synced to disk, and one atomic rename gives it its name. Deleting works the other
way round: rename, then remove. Leftover temporary folders are removed at the next save.

**No code runs on loading.** Everything but the tensors is JSON. DCP stores each tensor with ``torch.save`` and reads it
with ``weights_only=True``; its pickled index is read by an unpickler with a short list of allowed names.

**Loading changes everything or nothing.** Manifest, sizes, checksums, the model's tensors and optimizer groups are
checked before any tensor changes.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from stepgraph.errors import unknown_name
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.checkpoint.files import check_index, dcp_load, dcp_save, sha256, sync
from stepgraph.train.checkpoint.state import (
    Trim,
    absent_names,
    decode,
    describe_optimizers,
    describe_tensors,
    encode,
    first_difference,
    join_optimizers,
    model_tensors,
    plan_optimizers,
    rng_state,
    set_rng_state,
    without,
)

FORMAT = 1
PARTS = ("model", "optimizer", "loader", "schedule", "trainer")

_MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
# `.replaced` is the older of two checkpoints of one step, between the two renames that swap them.
_STEP = re.compile(r"step-(\d{8,})(\.replaced)?")


class Checkpointer:
    """Saves, finds and loads the checkpoints of one run; the ``keep`` newest stay.

    ``folder`` is the run's ``checkpoints`` folder, made at the first save. Under an initialized ``torch.distributed``
    every rank calls :meth:`save` and :meth:`load` with its own state (DTensors go as shards) on one shared file system;
    without it, one process works alone. One run writes to a folder at a time.

    ``state`` is a dict with ``"model"`` (a module) and any of ``"optimizer"`` (or a list), ``"loader"`` (an object with
    ``state_dict`` and ``load_state_dict``), ``"schedule"`` and ``"trainer"`` (plain dicts of numbers, strings, lists,
    tuples, dicts with string keys, small tensors). The RNG states of torch, CUDA, numpy and Python are always included.
    ``mesh``: the run's mesh as text. Tensors are saved in their true shapes and load on any mesh; each rank's RNG state
    and data position load on the same mesh only.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 3, mesh: str | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} would delete every checkpoint; use 1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self.mesh = mesh

    def save(self, step: int, state: dict) -> Path:
        """Write ``step-{step:08d}`` and return its path; an earlier checkpoint of the same step is replaced.

        Errors: ValueError for a state that cannot be saved; OSError, one line, when writing fails. Either leaves every
        earlier checkpoint as it was.
        """
        target = self.folder / f"step-{step:08d}"
        if step < 0:
            raise ValueError(f"step={step} is negative; steps count from 0")
        temporary = self.folder / (_TEMPORARY + target.name)
        ranks = Ranks()
        try:
            tensors, model, own, shared = ranks.each(lambda: _collect(state))
            if "optimizer" in shared and absent_names(state["model"]):
                layouts = ranks.gather(lambda: shared["optimizer"])
                shared["optimizer"] = join_optimizers(layouts, list(model))
            files = {_rank_file(ranks.rank): own} | ({"state.json": shared} if ranks.rank == 0 else {})
            ranks.first(lambda: self._start(temporary))
            dcp_save(tensors, temporary)
            written = ranks.gather(lambda: _write_rank(temporary, files, ranks.rank))
            manifest = {
                "format": FORMAT,
                "step": step,
                "ranks": ranks.world,
                "mesh": self.mesh,
                "versions": {"stepgraph": _stepgraph_version(), "torch": torch.__version__},
                "fingerprint": _fingerprint(model),
                "model": model,
                "files": {name: entry for entries in written for name, entry in sorted(entries.items())},
            }
            ranks.first(lambda: self._commit(temporary, target, manifest))
        except OSError as error:
            raise OSError(f"cannot write checkpoint {target}: {error}; earlier checkpoints are intact") from error
        finally:
            if ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # exists only after a failure; frees the disk space
        return target

    def latest(self) -> Path | None:
        """The newest complete checkpoint (every file there, with its size), or None; warns about each one it skips."""
        return _newest(self.folder)

    def load(self, path: str | os.PathLike, state: dict, *, rng: bool = True) -> None:
        """Load ``path`` (as :func:`resolve` takes it) in place into the parts of ``state``; with ``rng``, RNG states.

        Parts that ``state`` lacks are not loaded, so ``{"model": model}`` with ``rng=False`` reads the weights alone.
        Optimizer state that does not exist yet is created.

        Errors: ValueError, one line each: no checkpoint there, a damaged one (the file, and which earlier one is
        usable), another model (the first tensor that differs), other optimizer groups, another number of ranks.
        """
        ranks = Ranks()
        path = ranks.first(lambda: resolve(path))
        _check_parts(state)
        try:
            manifest = ranks.each(lambda: _verify(path, contents=True, rank=ranks.rank, world=ranks.world))
        except _DamagedError as error:
            advice = ranks.first(lambda: _advice(path))
            raise ValueError(f"checkpoint {path} is damaged: {error}; {advice}") from error
        targets, finish = ranks.each(lambda: _plan_load(path, manifest, state, rng, ranks))
        dcp_load(targets, path)
        finish()

    def is_of_this_mesh(self, path: Path) -> bool:
        """Whether the checkpoint ``path`` is of this run's mesh, so that every rank finds its own part in it."""
        ranks = Ranks()
        try:
            manifest = ranks.first(lambda: _verify(path, contents=False))
        except _DamagedError:
            return True  # loading it will report the error
        return (manifest["ranks"], manifest.get("mesh")) == (ranks.world, self.mesh)

    def _start(self, temporary: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(_TEMPORARY + "*"):
            shutil.rmtree(stale)
        for replaced in self.folder.glob("*.replaced"):
            if not replaced.with_suffix("").exists():
                replaced.rename(replaced.with_suffix(""))  # a crash between the two renames of a swap
        temporary.mkdir()

    def _commit(self, temporary: Path, target: Path, manifest: dict) -> None:
        (temporary / _MANIFEST).write_bytes(_render(manifest))
        sync(temporary / _MANIFEST)
        sync(temporary)
        replaced = target.with_name(target.name + ".replaced")
        if target.exists():
            if replaced.exists():
                self._remove(replaced)
            target.rename(replaced)
        temporary.rename(target)
        sync(self.folder)
        sync(self.folder.parent)  # the first save made the folder itself
        # Only now that the new one is safe is anything deleted, and never it, even if the folder has later steps.
        earlier = [path for path in _checkpoints(self.folder) if path != target and path.suffix != ".replaced"]
        for path in [*self.folder.glob("*.replaced"), *earlier[self.keep - 1 :]]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        away = path.with_name(f"{_TEMPORARY}deleted-{path.name}")
        path.rename(away)
        sync(self.folder)
        shutil.rmtree(away)


def loader_state(path: Path) -> dict:
    """The data position in the checkpoint ``path``, which is the same of every rank."""
    return decode(json.loads((path / _rank_file(0)).read_bytes())["loader"])


def resolve(path: str | os.PathLike) -> Path:
    """The ``step-*`` folder that ``path`` means: itself, or the newest complete one of a run or ``checkpoints`` folder.

    Errors: ValueError, one line, when there is none: what is there and what is expected.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{path} is {'a file' if path.exists() else 'not there'}; give a run folder or a step-* folder"
        )
    if _STEP.fullmatch(path.name) or (path / _MANIFEST).exists():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if newest := _newest(folder):
        return newest
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(_TEMPORARY))
    if damaged := _checkpoints(folder):
        raise ValueError(
            f"every checkpoint in {folder} is damaged ({', '.join(p.name for p in damaged)}); start a new run"
        )
    if folder != path or folder.name == "checkpoints" or not names:
        raise ValueError(f"{folder} holds no checkpoint yet; give the folder of a run that has saved one")
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise ValueError(
        f"{path} is not a checkpoint: it holds {shown}; give a run folder with checkpoints/, or one step-* folder "
        f"with {_MANIFEST}"
    )


# ---- finding and verifying ----


class _DamagedError(ValueError):
    """A checkpoint folder that does not match its manifest; the message names the file."""


def _checkpoints(folder: Path) -> list[Path]:
    """Every step folder, newest first; a replaced one right after the one that replaces it."""
    found = [(m, path) for path in (folder.iterdir() if folder.is_dir() else ()) if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda e: (int(e[0][1]), e[0][2] is None), reverse=True)]


def _newest(folder: Path) -> Path | None:
    for path in _checkpoints(folder):
        try:
            _verify(path, contents=False)
        except _DamagedError as error:
            warnings.warn(f"checkpoint {path} is skipped: {error}", stacklevel=3)
        else:
            return path
    return None


def _advice(damaged: Path) -> str:
    """What to load instead of ``damaged``: the newest earlier checkpoint beside it that passes every check."""
    siblings = _checkpoints(damaged.parent)
    for path in siblings[siblings.index(damaged) + 1 :] if damaged in siblings else ():
        with contextlib.suppress(_DamagedError):
            _verify(path, contents=True)
            return f"the earlier {path} is intact: delete {damaged.name} and resume again"
    return "no earlier checkpoint is usable, start a new run"


def _verify(path: Path, *, contents: bool, rank: int = 0, world: int = 1) -> dict:
    """The manifest, after comparing every file's size and, with ``contents``, the SHA-256 of this rank's share."""
    manifest = _read_manifest(path)
    for index, (name, entry) in enumerate(manifest["files"].items()):
        file = path / name
        if not file.is_file():
            raise _DamagedError(f"{name} is missing")
        if (size := file.stat().st_size) != entry["size"]:
            raise _DamagedError(f"{name} has {size} bytes, {entry['size']} were written")
        if contents and index % world == rank and sha256(file) != entry["sha256"]:
            raise _DamagedError(f"{name} does not match its SHA-256")
    return manifest


def _render(manifest: dict) -> bytes:
    """The bytes of the manifest: JSON with its own SHA-256, so that any changed byte is detected."""
    body = json.dumps(manifest, indent=1)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), **manifest}, indent=1).encode()


def _read_manifest(path: Path) -> dict:
    file = path / _MANIFEST
    if not file.is_file():
        raise _DamagedError(f"{_MANIFEST} is missing")
    raw = file.read_bytes()
    try:
        manifest = json.loads(raw)
        found = manifest.pop("format", None), manifest.pop("sha256", None)
    except (ValueError, AttributeError) as error:
        raise _DamagedError(f"{_MANIFEST} is not readable JSON") from error
    manifest = {"format": found[0], **manifest}
    if _render(manifest) != raw:
        raise _DamagedError(f"{_MANIFEST} does not match its SHA-256")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {manifest['format']}, this stepgraph reads {FORMAT}; update stepgraph"
        )
    return manifest


def _fingerprint(model: dict[str, list]) -> str:
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


# ---- what goes in, what comes out ----


def _check_parts(state: dict) -> None:
    for part in state:
        if part not in PARTS:
            raise unknown_name("part of a checkpoint", part, PARTS)
    if "model" not in state:
        raise ValueError(f"the state has {', '.join(state) or 'nothing'} and no model; add state['model']")


def _collect(state: dict) -> tuple[dict[str, torch.Tensor], dict[str, list], dict, dict]:
    """The tensors for DCP that are here, the description of all the model's, this rank's JSON, and that of all."""
    _check_parts(state)
    live, trim = model_tensors(state["model"]), Trim(state["model"])
    model = {name: trim(name, tensor) for name, tensor in live.items()}
    tensors = {f"model.{name}": tensor for name, tensor in model.items() if not tensor.is_meta}
    shared = {part: encode(state[part], part) for part in ("schedule", "trainer") if part in state}
    if "optimizer" in state:
        shared["optimizer"], optimizer_tensors = describe_optimizers(state["optimizer"], _names(live), trim)
        tensors |= optimizer_tensors
    own = {"rng": encode(rng_state(), "rng")}
    if "loader" in state:
        own["loader"] = encode(state["loader"].state_dict(), "loader")
    return tensors, describe_tensors(model), own, shared


def _plan_load(
    path: Path, manifest: dict, state: dict, rng: bool, ranks: Ranks
) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """The tensors DCP reads into, and a function that restores the rest; raises before anything has changed."""
    live, trim = model_tensors(state["model"]), Trim(state["model"])
    model = {name: trim(name, tensor) for name, tensor in live.items()}
    here = describe_tensors(model)
    if _fingerprint(here) != manifest["fingerprint"]:
        difference = first_difference(manifest["model"], here)
        raise ValueError(f"checkpoint {path} is of another model: {difference}; build the model as that run did")
    try:
        check_index(path)
    except pickle.UnpicklingError as error:
        raise ValueError(f"checkpoint {path} is not safe to load: {error}; use one that this run wrote") from error
    shared, own = json.loads((path / "state.json").read_bytes()), {}
    if rng or "loader" in state:
        if manifest["ranks"] != ranks.world:
            raise ValueError(
                f"checkpoint {path} has random streams and data positions of {manifest['ranks']} ranks and this run "
                f"has {ranks.world}; run with {manifest['ranks']}, or load without loader and rng"
            )
        own = json.loads((path / _rank_file(ranks.rank)).read_bytes())
    for part in state:
        if part != "model" and part not in shared and part not in own:
            raise ValueError(f"checkpoint {path} was saved without {part!r}; leave {part!r} out of the state to load")

    targets = {f"model.{name}": tensor for name, tensor in model.items() if not tensor.is_meta}
    restore_optimizer = None
    if "optimizer" in state:
        try:
            saved = without(shared["optimizer"], absent_names(state["model"]))
            slots, restore_optimizer = plan_optimizers(state["optimizer"], _names(live), saved, trim)
        except ValueError as error:
            raise ValueError(f"checkpoint {path} does not fit: {error}") from error
        targets |= slots
    if "loader" in state:  # changed first: a loader over other data raises here
        state["loader"].load_state_dict(decode(own["loader"]))

    def finish() -> None:
        if restore_optimizer:
            restore_optimizer()
        for part in ("schedule", "trainer"):
            if part in state:
                state[part].clear()
                state[part].update(decode(shared[part]))
        if rng:
            set_rng_state(decode(own["rng"]))

    return targets, finish


def _names(model: dict[str, torch.Tensor]) -> dict[int, str]:
    return {id(tensor): name for name, tensor in model.items()}


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _stepgraph_version() -> str:
    try:
        return importlib.metadata.version("stepgraph")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _write_rank(folder: Path, files: dict[str, dict], rank: int) -> dict[str, dict]:
    """Write this rank's JSON files, sync these and what DCP wrote for the rank; size and SHA-256 of each."""
    for name, content in files.items():
        (folder / name).write_bytes(json.dumps(content).encode())
    names = [*files, *(file.name for file in folder.glob(f"__{rank}_*"))] + ([".metadata"] if rank == 0 else [])
    for name in names:
        sync(folder / name)
    return {name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
