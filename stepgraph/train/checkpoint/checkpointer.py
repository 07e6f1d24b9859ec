"""Checkpoints of a training run that survive a crash at any moment and resume bitwise.

On disk, ``RUN/checkpoints/step-00000100/`` holds

    .metadata, __0_0.distcp   model and optimizer tensors by torch.distributed.checkpoint (DCP), one file per rank
    state.json                optimizer layout and options, trainer
    rank-00000.json           random number streams and data position, one file per rank
    manifest.json             format, step, versions, the model's tensors, each file's size and SHA-256

**A crash** leaves the earlier checkpoints intact: a checkpoint is written to a temporary folder, synced to disk, and
gets its name by one atomic rename. Deleting is a rename, then a removal; the next save removes leftover folders.
**No code runs on loading**: all but the tensors is JSON, and an unpickler with a list of allowed names reads the index.
**Loading changes everything or nothing**: all is checked before any tensor changes.
"""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

import stepgraph
from stepgraph.parallel.ranks import Ranks
from stepgraph.run.watch.lost_ranks import is_lost_rank
from stepgraph.train.checkpoint.files import (
    FORMAT,
    MANIFEST,
    TEMPORARY,
    DamagedError,
    advice,
    check_index,
    checkpoints,
    dcp_load,
    dcp_save,
    is_sound,
    newest,
    render,
    resolve,
    sha256,
    step_of,
    sync,
    verify,
)
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

_Tensors = dict[str, torch.Tensor]


class Checkpointer:
    """Saves, finds and loads the checkpoints of one run; the ``keep`` newest stay, and one each ``keep_every`` steps.

    ``folder`` is the run's ``checkpoints`` folder, made at the first save. Under ``torch.distributed`` every rank calls
    :meth:`save` and :meth:`load` with its own state (DTensors go as shards) on one shared file system.

    ``state`` is a dict with ``"model"`` (a module) and any of ``"optimizer"`` (or a list), ``"loader"`` (an object with
    ``state_dict`` and ``load_state_dict``) and ``"trainer"`` (a plain dict of numbers, strings, lists, tuples, dicts
    with string keys, small tensors). The RNG states of torch, CUDA, numpy and Python are always included.
    ``mesh``: the run's mesh as text. Tensors are saved in their true shapes and load on any mesh; each rank's RNG state
    and data position load on the same mesh only.
    """

    def __init__(
        self, folder: str | os.PathLike, *, keep: int = 3, keep_every: int = 0, mesh: str | None = None
    ) -> None:
        self.folder = Path(folder)
        self.keep, self.keep_every = keep, keep_every
        self.mesh = mesh
        self._later: list[Path] = []
        self._then: Callable[[], None] = lambda: None

    def save(self, step: int, state: dict, evict: bool = True) -> Path:
        """Write ``step-{step:08d}`` and return its path; an earlier checkpoint of the same step is replaced. Without
        ``evict`` no other is deleted.

        Errors: ValueError for a state that cannot be saved; OSError, one line, when writing fails, for any reason but a
        lost rank. Either leaves every earlier checkpoint as it was.
        """
        return self.collect(step, state, evict)()

    def collect(
        self, step: int, state: dict, evict: bool = True,
        copied: Callable[[_Tensors], _Tensors] = lambda tensors: tensors,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> Callable[[], Path]:  # fmt: skip
        """`save` in two parts: take all but the tensors out of ``state``, and return a function that writes these and
        what ``copied`` makes of the tensors, and returns the path. ``group``: what the ranks meet in while they write.
        """
        ranks = Ranks()

        def work() -> tuple[_Tensors, dict[str, list], dict, dict]:
            tensors, *rest = _collect(state)
            return copied(tensors), *rest

        tensors, model, own, shared = ranks.each(work)
        if "optimizer" in shared and absent_names(state["model"]):
            layouts = ranks.gather(lambda: shared["optimizer"])
            shared["optimizer"] = join_optimizers(layouts, list(model))
        files = {_rank_file(ranks.rank): own} | ({"state.json": shared} if ranks.rank == 0 else {})
        return lambda: self._write(step, tensors, model, files, evict, group)

    def _write(
        self, step: int, tensors: _Tensors, model: dict[str, list], files: dict[str, dict], evict: bool,
        group: torch.distributed.ProcessGroup | None,
    ) -> Path:  # fmt: skip
        target = self.folder / f"step-{step:08d}"
        temporary = self.folder / (TEMPORARY + target.name)
        ranks = Ranks(group=group)
        try:
            ranks.first(lambda: self._start(temporary))
            dcp_save(tensors, temporary, group)
            written = ranks.gather(lambda: _write_rank(temporary, files, ranks.rank))
            manifest = {
                "format": FORMAT,
                "step": step,
                "ranks": ranks.world,
                "mesh": self.mesh,
                "versions": {"stepgraph": stepgraph.__version__, "torch": torch.__version__},
                "fingerprint": _fingerprint(model),
                "model": model,
                "files": {name: entry for entries in written for name, entry in sorted(entries.items())},
            }
            ranks.first(lambda: self._commit(temporary, target, manifest, evict))
        except Exception as error:
            if is_lost_rank(error):
                raise
            intact = "; earlier checkpoints are intact" if checkpoints(self.folder) else ""
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise OSError(f"cannot write checkpoint {target}: {' '.join(what.split())}{intact}") from error
        finally:
            if ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # exists only after a failure; frees the disk space
        return target

    def latest(self) -> Path | None:
        """The newest complete checkpoint (every file there, with its size), or None; warns about each one it skips."""
        return newest(self.folder)

    def load(self, path: str | os.PathLike, state: dict, *, rng: bool = True) -> None:
        """Load ``path`` (as :func:`resolve` takes it) in place into the parts of ``state``; with ``rng``, RNG states.

        Parts that ``state`` lacks are not loaded, so ``{"model": model}`` with ``rng=False`` reads only the weights.
        Optimizer state that does not exist yet is created. Errors: ValueError, one line each.
        """
        ranks = Ranks()
        path = ranks.first(lambda: resolve(path))
        try:
            manifest = ranks.each(lambda: verify(path, contents=True, rank=ranks.rank, world=ranks.world))
        except DamagedError as error:
            fix = ranks.first(lambda: advice(path))
            raise ValueError(f"checkpoint {path} is damaged: {error}; {fix}") from error
        targets, finish = ranks.each(lambda: _plan(path, manifest, state, rng, ranks))
        dcp_load(targets, path)
        finish()

    def is_of_this_mesh(self, path: Path) -> bool:
        """Whether the checkpoint ``path`` was written on this run's mesh, so every rank finds its own part."""
        ranks = Ranks()
        try:
            manifest = ranks.first(lambda: verify(path, contents=False))
        except DamagedError:
            return True  # loading it will report the error
        return (manifest.get("ranks"), manifest.get("mesh")) == (ranks.world, self.mesh)

    def _start(self, temporary: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        temporary.mkdir()

    def _clean(self) -> None:
        """Remove or put back what a process left that was killed in mid-save."""
        for stale in self.folder.glob(TEMPORARY + "*"):
            shutil.rmtree(stale)
        for replaced in self.folder.glob("*.replaced"):
            if not replaced.with_suffix("").exists():
                replaced.rename(replaced.with_suffix(""))  # a crash between the two renames of a swap

    def _commit(self, temporary: Path, target: Path, manifest: dict, evict: bool) -> None:
        (temporary / MANIFEST).write_bytes(render(manifest))
        sync(temporary / MANIFEST)
        sync(temporary)
        replaced = target.with_name(target.name + ".replaced")
        if target.exists():
            if replaced.exists():
                self._remove(replaced)
            target.rename(replaced)
        temporary.rename(target)
        sync(self.folder)
        sync(self.folder.parent)  # the first save made the folder itself
        self.settle(target)
        self._prune(target, evict)

    def _prune(self, target: Path, evict: bool) -> None:
        """Delete what no longer stays now that ``target`` is safe: never it, even if the folder has later steps."""
        earlier = [path for path in checkpoints(self.folder) if path != target and path.suffix != ".replaced"]
        sound = [path for path in earlier if is_sound(path)]  # a damaged one takes no place of theirs
        for path in [*self.folder.glob("*.replaced"), *(sound[self.keep - 1 :] if evict else [])]:
            if path.suffix == ".replaced" or not self.keep_every or step_of(path) % self.keep_every:
                self._remove(path)

    def rewind(self, step: int, then: Callable[[], None]) -> None:
        """The run repeats the steps after ``step``: once its next checkpoint is safe, delete the checkpoints of later
        steps that are there now, and call ``then``."""
        self._later, self._then = self.after(step), then

    def after(self, step: int) -> list[Path]:
        """The checkpoints of later steps."""
        return [path for path in checkpoints(self.folder) if step_of(path) > step]

    def settle(self, target: Path | None = None) -> None:
        """Do what `rewind` left for later. ``target``: the checkpoint that stays."""
        for path in self._later:
            if path != target and path.exists():
                self._remove(path)
        self._later = []
        self._then()

    def finish(self, evict: bool = True) -> None:
        """The run is done: delete what a killed save would have deleted, and what `rewind` left for later."""
        self.settle()
        self._clean()
        if newest := self.latest():
            self._prune(newest, evict)

    def _remove(self, path: Path) -> None:
        away = path.with_name(f"{TEMPORARY}deleted-{path.name}")
        path.rename(away)
        sync(self.folder)
        shutil.rmtree(away)


def loader_state(path: Path) -> dict:
    """The data position in the checkpoint ``path``, the same on all ranks."""
    return decode(json.loads((path / _rank_file(0)).read_bytes())["loader"])


# ---- what goes in, what comes out ----


def tensors_of(state: dict) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of ``state`` has of this rank, by their names in it."""
    return _collect({part: state[part] for part in ("model", "optimizer") if part in state})[0]


def _fingerprint(model: dict[str, list]) -> str:
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def _collect(state: dict) -> tuple[dict[str, torch.Tensor], dict[str, list], dict, dict]:
    """The tensors for DCP that are here, the description of all the model's, this rank's JSON, and that of all."""
    live, trim = model_tensors(state["model"]), Trim(state["model"])
    model = {name: trim(name, tensor) for name, tensor in live.items()}
    tensors = {f"model.{name}": tensor for name, tensor in model.items() if not tensor.is_meta}
    shared = {"trainer": encode(state["trainer"], "trainer")} if "trainer" in state else {}
    if "optimizer" in state:
        shared["optimizer"], optimizer_tensors = describe_optimizers(state["optimizer"], _names(live), trim)
        tensors |= optimizer_tensors
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()  # the GPU may still write state that is in host memory
    own = {"rng": encode(rng_state(), "rng")}
    if "loader" in state:
        own["loader"] = encode(state["loader"].state_dict(), "loader")
    return tensors, describe_tensors(model), own, shared


def _plan(
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
                f"checkpoint {path} has random states and data positions of {manifest['ranks']} ranks and this run "
                f"has {ranks.world}; run with {manifest['ranks']}, or load without loader and rng"
            )
        own = json.loads((path / _rank_file(ranks.rank)).read_bytes())
    targets = {f"model.{name}": tensor for name, tensor in model.items() if not tensor.is_meta}
    restore_optimizer = None
    if "optimizer" in state:
        try:
            saved = without(shared["optimizer"], absent_names(state["model"]))
            slots, restore_optimizer = plan_optimizers(state["optimizer"], _names(live), saved, trim)
        except ValueError as error:
            raise ValueError(f"checkpoint {path} does not fit: {error}") from error
        targets |= slots
    trainer = decode(shared["trainer"]) if "trainer" in state else None
    streams = decode(own["rng"]) if rng else None
    if "loader" in state:  # changed first: a loader over other data raises here
        state["loader"].load_state_dict(decode(own["loader"]))

    def finish() -> None:
        if restore_optimizer:
            restore_optimizer()
        if trainer is not None:
            state["trainer"].clear()
            state["trainer"].update(trainer)
        if streams is not None:
            set_rng_state(streams)

    return targets, finish


def _names(model: dict[str, torch.Tensor]) -> dict[int, str]:
    return {id(tensor): name for name, tensor in model.items()}


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _write_rank(folder: Path, files: dict[str, dict], rank: int) -> dict[str, dict]:
    """Write this rank's JSON files, sync these and what DCP wrote for the rank; size and SHA-256 of each."""
    for name, content in files.items():
        (folder / name).write_bytes(json.dumps(content).encode())
    names = [*files, *(file.name for file in folder.glob(f"__{rank}_*"))] + ([".metadata"] if rank == 0 else [])
    for name in names:
        sync(folder / name)
    return {name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
