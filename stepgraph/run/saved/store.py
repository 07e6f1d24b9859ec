"""Finds, loads and saves the steps of a folder."""

import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture import Traced
from stepgraph.capture.roles import groups_by_axis
from stepgraph.graph.facts import is_view
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.inductor.packed import NotLoadable, NotSavable
from stepgraph.inductor.regional import PieceCall, piece_calls, with_functions
from stepgraph.parallel.pipeline import Pipeline
from stepgraph.parallel.ranks import Ranks
from stepgraph.passes.compile.ahead import Ahead
from stepgraph.passes.compile.helpers import drop_helpers
from stepgraph.passes.contract import Pass
from stepgraph.run.saved import key
from stepgraph.run.saved.folder import DamagedEntry, Entry, Folder, UnsafeFolder, cache_folder
from stepgraph.run.saved.graphs import Captured, Reader, Writer, digest

#: A miss in a named folder is compared with at most this many saved steps.
_COMPARED = 16


@dataclass
class Outcome:
    """How a step was made. ``loaded``: after its trace, its passes and compiled code were loaded. ``kept``: the entry
    that holds it, None where it is not saved. ``seconds``: time spent on the key and on loading. ``notes``: what a user
    should know, each in one line."""

    loaded: bool = False
    kept: str | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The outcome in one line."""
        if self.loaded:
            return f"saved step loaded in {self.seconds:.1f} s: no pass ran and nothing was compiled"
        return f"no saved step matches ({self.seconds:.1f} s): built from scratch"


@dataclass(frozen=True)
class Rewriting:
    """What happens to a captured program: ``apply`` runs ``passes`` on it, for ``device`` and this rank's ``pipeline``,
    and puts the result in its place."""

    apply: Callable[[Traced], None]
    passes: Sequence[Pass]
    device: torch.device
    pipeline: Pipeline | None


def store_of(where: Path | str, dumps: bool) -> "Store | None":
    """The store of a folder that a caller named, or of the user's cache (``"auto"``; None where that is off).

    None where a rank ``dumps`` its graphs, which only passes that run can do: for all ranks then, as they share what
    they save. Every rank calls this.
    """
    if any(Ranks(alone=not _several_ranks()).gather(lambda: dumps)):
        return None
    if where != "auto":
        return Store(Folder(Path(where), given=True))
    path = cache_folder()
    return None if path is None else Store(Folder(path, given=False))


class Store:
    """The steps of one folder."""

    def __init__(self, folder: Folder):
        self.folder = folder

    def rewrite(self, traced: Traced, rewriting: Rewriting, together: bool) -> Outcome:
        """Replace the captured program by the rewritten one: loaded, or made and then saved.

        ``together``: every rank is here. Ranks that have one graph share it: the first makes it, the others load it.
        """
        saving = _Saving(self.folder, traced, rewriting)
        if together and _several_ranks():
            saving.on_ranks()
        elif not saving.load():
            saving.make()
        return saving.outcome


class _Saving:
    """One captured program on its way to a rewritten one."""

    def __init__(self, folder: Folder, traced: Traced, rewriting: Rewriting):
        self.folder, self.traced, self.rewriting = folder, traced, rewriting
        self.outcome, self.damaged = Outcome(), False
        self.own = _own_device(rewriting.device)
        began = time.perf_counter()
        self.captured, self.objects = traced.program, Captured.of(traced.program)
        self.parts: dict[str, Any] = {}
        try:
            self.parts = self._parts()
        except NotSavable as reason:
            self.outcome.notes.append(f"the step cannot be saved: {reason}")
        self.name = key.entry_name(self.parts) if self.parts else None
        self.outcome.seconds = time.perf_counter() - began

    def _parts(self) -> dict[str, Any]:
        """The key. Raises `NotSavable`."""
        passes, device = self.rewriting.passes, self.rewriting.device
        facts, compiles = key.pass_facts(passes), any(p.name == "inductor" for p in passes)
        nodes = sum(len(step.graph.nodes) for step in self.captured.graphs.values())
        return {
            "graph": {"nodes": nodes, "text": digest(self.captured, self.own)},
            "passes": facts,
            "versions": key.versions(),
            "device": key.device_facts(device, compiles),
            "settings": key.settings(compiles),
            "mesh": key.mesh_facts(self.captured.main.mesh, self.captured),
            "pipeline": key.pipeline_facts(self.rewriting.pipeline),
        }

    def on_ranks(self) -> None:
        """Load or make the step on every rank."""
        ranks, found = Ranks(), self.load()
        wanted = ranks.gather(lambda: None if found else self.name or f"rank {ranks.rank}")
        if not any(wanted):
            return
        maker = ranks.rank if found else wanted.index(wanted[ranks.rank])
        makes, failure = not found and maker == ranks.rank, None
        try:
            if makes:
                self.make()
        except BaseException as error:  # raised after the barrier, at which the others wait
            failure = error
        dist.barrier()
        if failure is not None:
            raise failure
        if found or makes:
            return
        missed, self.outcome.notes = self.outcome.notes, []
        if self.load():
            self.outcome.notes.insert(0, f"rank {maker}, which has the same graph, made the step")
        else:
            self.outcome.notes = missed + self.outcome.notes
            self.make()

    def load(self) -> bool:
        """Replace the captured program by the saved step; whether it exists and is whole."""
        began = time.perf_counter()
        if self.name is not None and (entry := self._read()) is not None:
            drop_helpers()  # before they create GPU contexts, for which this process would wait
            try:
                saved = pickle.loads(entry.files["program"])
                self._name_groups(saved)
                program = self._program(saved, entry.files)
            except (NotLoadable, OSError) as reason:  # no room where torch unpacks what it compiled
                self.outcome.notes.append(f"a saved step cannot be loaded here: {reason}")
            else:
                program.main.capture_s = self.captured.capture_s
                self.traced.program = program
                self.outcome.loaded, self.outcome.kept = True, self.name
        self.outcome.seconds += time.perf_counter() - began
        return self.outcome.loaded

    def make(self) -> None:
        """Rewrite the captured program and save the result."""
        if self.name is not None and not self.damaged:
            self.outcome.notes += self._missed()
        self.rewriting.apply(self.traced)
        if self.name is None:
            return
        try:
            self.folder.write(self.name, self.parts, self._files(), replace=self.damaged)
            self.outcome.kept = self.name
        except NotSavable as reason:
            self.outcome.notes.append(f"the step cannot be saved: {reason}")
        except UnsafeFolder as reason:
            warnings.warn(f"the step is not saved: {reason}", stacklevel=2)
        except OSError as failure:  # a full disk, there or where torch packs what it compiled
            warnings.warn(f"the step is not saved in {self.folder.path}: {failure.strerror}", stacklevel=2)

    def _read(self) -> Entry | None:
        """The entry, or None where there is none that may be used."""
        try:
            entry = self.folder.read(self.name)
            if entry and key.entry_name(entry.parts) != self.name:
                raise DamagedEntry(f"{self.folder.path / self.name} holds another step")
            return entry
        except (DamagedEntry, UnsafeFolder) as reason:
            self.damaged = True
            self.outcome.notes.append(f"a saved step is not used: {reason}")
        return None

    def _missed(self) -> list[str]:
        """In a folder that the caller named: the parts in which the nearest saved step differs."""
        if not self.folder.given:
            return []
        found = []
        for name in self.folder.names()[:_COMPARED]:
            try:
                found.append(key.differing(self.folder.parts(name), self.parts))
            except DamagedEntry:
                continue
        found = [differing for differing in found if differing]  # else the step itself, which could not be loaded
        return [f"no saved step fits; the nearest differs in {', '.join(min(found, key=len))}"] if found else []

    def _name_groups(self, saved: dict[str, Any]) -> None:
        """Give process groups that passes use, and the capture does not, the names that saved nodes call them by.
        Raises `NotLoadable`."""
        groups = groups_by_axis(slot.tensor for slot in self.traced.slots)
        if self.rewriting.pipeline is not None:
            groups |= self.rewriting.pipeline.named_groups()
        named = _axes(self.captured)
        axes = (name for step in saved["program"]["graphs"].values() for name in step["axes"])
        for name in dict.fromkeys(axes):
            if name not in named and (name not in groups or compat.name_group(groups[name], name) != name):
                raise NotLoadable(f"the process group {name} has another name here")

    def _program(self, saved: dict[str, Any], files: dict[str, bytes]) -> StepProgram:
        """The program of an entry. Raises `NotLoadable`."""
        reader = Reader(self.own, saved["constants"], self.captured)
        program = reader.program(saved["program"], saved["pieces"])
        # Triton's cache is another's on another machine or GPU, and may have been emptied.
        ahead = Ahead(step.graph for step in program.graphs.values())
        ahead.start()
        for name, step in program.graphs.items():
            if name in saved["pieces"]:
                calls = [PieceCall(piece, tuple(nodes)) for piece, nodes in saved["pieces"][name]]
                pieces = {piece: files[f"{name}.{piece}"] for piece in dict.fromkeys(c.name for c in calls)}
                functions = {piece: compat.inductor_load(data) if data else None for piece, data in pieces.items()}
                step.executable = with_functions(step.module, calls, functions)
            step.log, step.recording = saved["reports"][name]
        program.log = saved["log"]
        for report in program.reports:  # nothing was applied nor compiled
            report.apply_s = report.compile_s = 0.0
        self.outcome.notes += ahead.finish()
        return program

    def _files(self) -> dict[str, bytes]:
        """The files of the rewritten program. Raises `NotSavable`."""
        program, writer = self.traced.program, Writer(self.own, self.objects)
        written: dict[str, Any] = {"program": writer.program(program), "constants": writer.constants, "pieces": {}}
        written["reports"] = {name: (step.log, step.recording) for name, step in program.graphs.items()}
        written["log"], files = program.log, {}
        for name, step in program.graphs.items():
            if step.executable is not step.module:
                calls, pieces = _pieces(step)
                written["pieces"][name] = [[call.name, call.nodes] for call in calls]
                files |= {f"{name}.{piece}": data for piece, data in pieces.items()}
        return files | {"program": pickle.dumps(written)}


def _pieces(step: StepGraph) -> tuple[list[PieceCall], Mapping[str, bytes]]:
    calls, pieces = piece_calls(step.executable), {}
    nodes = {node.name: node for node in step.graph.nodes}
    for name in dict.fromkeys(call.name for call in calls):
        piece = getattr(step.executable, name)
        if piece.any_length:
            raise NotSavable("a piece that serves any length has no saved form: leave out any_length")
        inside = next(call.nodes for call in calls if call.name == name)
        if all(is_view(nodes[node]) for node in inside):
            pieces[name] = b""  # torch compiles nothing
            continue
        try:
            pieces[name] = compat.inductor_artifact(piece.function)
        except ValueError as reason:
            raise NotSavable(str(reason)) from None
    return calls, pieces


def _axes(program: StepProgram) -> set[str]:
    """The names that its graphs give process groups."""
    return {name for step in program.graphs.values() for name in step.axes}


def _own_device(device: torch.device) -> torch.device | None:
    """The GPU of this rank, with its number; None on a CPU."""
    if device.type != "cuda" or device.index is not None:
        return device if device.type == "cuda" else None
    return torch.device("cuda", torch.cuda.current_device())


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
