"""Finds, loads and saves the steps of a folder."""

import contextlib
import dataclasses
import gzip
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture import Traced
from stepgraph.graph.facts import is_view
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.inductor.regional import PieceCall, piece_calls, with_functions
from stepgraph.passes.compile.ahead import Ahead
from stepgraph.run.saved import key
from stepgraph.run.saved.folder import DamagedEntry, Entry, Folder, UnsafeFolder, cache_folder
from stepgraph.run.saved.graphs import Captured, Reader, Writer, decode_report, decode_reports, encode_reports
from stepgraph.run.saved.nearest import missed_graph, missed_start
from stepgraph.run.saved.reads.describe import Indescribable
from stepgraph.run.saved.reads.sources import Sources, changed_since
from stepgraph.run.saved.start import Bindings, Start, name_groups, record_of, traced_of
from stepgraph.run.saved.values import NotLoadable, NotSavable


@dataclass
class Outcome:
    """How a step came about. ``loaded``: ``start`` (not even captured), ``graph`` (neither rewritten nor compiled) or
    None. ``kept``: the entry that holds it, None where it is not saved. ``seconds``: that looking it up and loading
    took. ``notes``: what a user should know, each in one line."""

    loaded: str | None = None
    kept: str | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def tell(self, note: str) -> None:
        """Add a note; what is found twice, in looking for the start and for its graph, is told once."""
        if note not in self.notes:
            self.notes.append(note)

    def line(self) -> str:
        """The outcome in one line."""
        what = {
            "start": "loaded; nothing was captured, rewritten or compiled",
            "graph": "loaded; it was captured again, and neither rewritten nor compiled",
            None: "made new",
        }[self.loaded]
        return f"step {what} ({self.seconds:.1f} s)"


@dataclass
class Request:
    """One program to find or to make, captured of ``start``."""

    program: StepProgram
    start: Start

    def __post_init__(self) -> None:
        self.own = own_device(self.start.device)
        self.captured = Captured.of(self.program)
        self.text = self.program.text()
        self.live: list[str] = []  # why its graph cannot do without a capture

    def parts(self) -> dict[str, Any]:
        """The key of the graph. Raises `NotSavable`."""
        writer = Writer(self.own, None)
        written = writer.program(self.program)
        nodes = sum(len(graph["graph"]["nodes"]) for graph in written["graphs"].values())
        graph = {"nodes": nodes, "text": key.digest([written, writer.digest])}
        return {"graph": graph} | surroundings(self.start)


def surroundings(start: Start) -> dict[str, Any]:
    """The parts of a key that do not depend on the model."""
    passes, device = start.passes, start.device
    compiles = any(p.name == "inductor" for p in passes)
    try:
        facts = key.pass_facts(passes)
    except ValueError as reason:
        raise NotSavable(str(reason)) from None
    return {
        "passes": facts,
        "versions": key.versions(),
        "device": key.device_facts(device, compiles),
        "settings": key.settings(compiles),
        "mesh": key.mesh_facts(start.mesh),
        "pipeline": key.pipeline_facts(start.pipeline),
    }


def store_of(where: Path | str, dumps: bool) -> "Store | None":
    """The store of a folder that a caller named, or of the user's cache (``"auto"``; None where that is off).

    None where a rank ``dumps`` its graphs, which are those of passes that ran: of all ranks, as they share what they
    save. Every rank asks.
    """
    if any(_gathered(dumps) if _several_ranks() else [dumps]):
        return None
    if where != "auto":
        return Store(Folder(Path(where), given=True))
    path = cache_folder()
    return None if path is None else Store(Folder(path, given=False))


def own_device(device: torch.device) -> torch.device | None:
    """The GPU of this rank, with its number; None on a CPU."""
    if device.type != "cuda" or device.index is not None:
        return device if device.type == "cuda" else None
    return torch.device("cuda", torch.cuda.current_device())


class Store:
    """The steps of one folder."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.damaged: set[str] = set()

    def step(
        self, start: Start, capture: Callable[[], Traced], rewrite: Callable[[Traced], None], together: bool
    ) -> tuple[Traced, Outcome]:
        """The step of ``start``: loaded, or captured and then loaded, or made by ``rewrite`` and saved.

        ``together``: every rank is here. Those that have one graph share it: the first makes it, the others load it.
        """
        began = time.perf_counter()
        together = together and _several_ranks()
        outcome, sources = Outcome(), Sources()
        with compat.collector_off():
            parts = self._start_parts(start, outcome)
            traced = self._started(start, parts, sources, outcome) if parts else None
        if together and not all(_gathered(traced is not None)):
            traced = None  # a capture may open process groups, which all ranks must do
        if traced is not None:
            outcome.loaded, outcome.kept = "start", key.entry_name("start", parts)
            outcome.seconds = time.perf_counter() - began
            return traced, outcome
        with sources.recorded() if parts else contextlib.nullcontext():
            traced = capture()
        request = Request(traced.program, start)
        told = bool(parts and outcome.notes)
        name = self._rewritten(traced, request, rewrite, together, outcome, told)
        if parts and name:
            self._save_start(start, parts, sources, traced, name, outcome)
        return traced, outcome

    def _start_parts(self, start: Start, outcome: Outcome) -> dict[str, Any] | None:
        try:
            return start.parts() | surroundings(start)
        except (Indescribable, NotSavable) as reason:
            outcome.tell(f"the step is captured at every start, as nothing stands for {reason}")
            return None

    def _started(self, start: Start, parts: dict[str, Any], sources: Sources, outcome: Outcome) -> Traced | None:
        """The step of a start that was saved, without a capture."""
        name = key.entry_name("start", parts)
        entry = self.read(name, outcome)
        if entry is None:
            if name not in self.damaged:
                outcome.notes += missed_start(self.folder, parts)
            return None
        record = json.loads(entry.files["start.json"])
        change = changed_since(record, sources)
        if change:
            self.damaged.add(name)  # out of date: to be replaced
            outcome.tell(f"captured, as {change} changed since the saved start")
            return None
        graphs = self.read(record["graph"], outcome)
        if graphs is None:
            return None
        try:
            name_groups(start.groups(), axes_of(graphs))
            program = program_of(graphs, own_device(start.device), Bindings(start, record), None, start.mesh, outcome)
        except (NotLoadable, OSError) as reason:  # no room where torch unpacks what it compiled
            outcome.tell(f"a saved step cannot be loaded here: {reason}")
            return None
        return traced_of(start, record, program)

    def _save_start(
        self, start: Start, parts: dict[str, Any], sources: Sources, traced: Traced, graph: str, outcome: Outcome
    ) -> None:
        try:
            data = record_of(start, traced, sources, graph)
        except Indescribable as reason:
            outcome.tell(f"the step is captured at every start, as nothing stands for {reason}")
            return
        self.write(key.entry_name("start", parts), parts, lambda: {"start.json": data})

    def _rewritten(
        self,
        traced: Traced,
        request: Request,
        rewrite: Callable[[Traced], None],
        together: bool,
        outcome: Outcome,
        told: bool,
    ) -> str | None:
        """Load what ``rewrite`` would make of a capture, or let it make it and save it; the name of its entry, None
        where its graph alone cannot stand for the start. ``told``: why nothing was found is already in the notes."""
        began = time.perf_counter()
        try:
            parts = request.parts()
        except NotSavable as reason:
            outcome.tell(f"the step cannot be saved: {reason}")
            parts = {}
        name = key.entry_name("graph", parts) if parts else None
        found = bool(name) and self._load(name, traced, request, outcome)
        if name and not found and name not in self.damaged and not told:
            outcome.notes += missed_graph(self.folder, parts, request.text)
        outcome.seconds = time.perf_counter() - began
        saved = found

        def make() -> None:
            nonlocal saved
            rewrite(traced)
            saved = bool(name) and self._save(name, parts, traced, request, outcome)

        if together:
            saved = self._shared(name, traced, request, make, outcome, found) or saved
        elif not found:
            make()
        outcome.kept = name if saved else None
        return name if saved and not request.live else None

    def _shared(
        self,
        name: str | None,
        traced: Traced,
        request: Request,
        make: Callable[[], None],
        outcome: Outcome,
        found: bool,
    ) -> bool:
        """Make or load the step on every rank; whether it was loaded."""
        wanted = _gathered(None if found else name or f"rank {dist.get_rank()}")
        if not any(wanted):
            return True
        maker = dist.get_rank() if found else wanted.index(wanted[dist.get_rank()])
        failure: BaseException | None = None
        if not found and maker == dist.get_rank():
            try:
                make()
            except BaseException as error:  # the others wait: they are told first
                failure = error
        dist.barrier()
        if failure is not None:
            raise failure
        if found or maker == dist.get_rank():
            return found
        told, outcome.notes = outcome.notes, []
        if not self._load(name, traced, request, outcome):
            outcome.notes = told + outcome.notes
            make()
            return False
        outcome.notes.insert(0, f"rank {maker}, which has the same graph, made the step")
        return True

    @compat.collector_off()
    def _load(self, name: str, traced: Traced, request: Request, outcome: Outcome) -> bool:
        """Put the saved step ``name`` in the place of the captured program; whether it is there and whole."""
        entry = self.read(name, outcome)
        if entry is None:
            return False
        tensors = {spec.what: spec.tensor for step in traced.program.graphs.values() for spec in step.inputs}
        try:
            captured = {name for step in traced.program.graphs.values() for name in step.axes}
            name_groups(request.start.groups(), [name for name in axes_of(entry) if name not in captured])
            live = request.captured.find(traced.program)
            program = program_of(entry, request.own, tensors.get, live, request.start.mesh, outcome)
        except (NotLoadable, OSError) as reason:  # no room where torch unpacks what it compiled
            outcome.tell(f"a saved step cannot be loaded here: {reason}")
            return False
        program.main.capture_s = traced.program.capture_s
        traced.program = program
        request.live = entry.program["live"]
        outcome.loaded = "graph"
        return True

    def read(self, name: str, outcome: Outcome) -> Entry | None:
        """An entry, or None where there is none that may be used."""
        try:
            entry = self.folder.read(name)
            if entry and key.entry_name(name.partition("-")[0], entry.parts) != name:
                raise DamagedEntry(f"{self.folder.path / name} holds another step")
            return entry
        except (DamagedEntry, UnsafeFolder) as reason:
            self.damaged.add(name)
            outcome.tell(f"a saved step is not used: {reason}")
        return None

    def _save(self, name: str, parts: dict[str, Any], traced: Traced, request: Request, outcome: Outcome) -> bool:
        """Save the rewritten program; whether it is saved. What cannot be is told, and costs no step."""
        try:
            return self.write(name, parts, lambda: files_of(traced.program, request))
        except NotSavable as reason:
            outcome.tell(f"the step cannot be saved: {reason}")
            return False

    def write(self, name: str, parts: dict[str, Any], files: Callable[[], dict[str, bytes]]) -> bool:
        """Write an entry of ``files``; whether it is there. A full disk, there or where torch packs what it compiled,
        costs a warning."""
        try:
            self.folder.write(name, parts, files(), replace=name in self.damaged)
            self.damaged.discard(name)
            return True
        except UnsafeFolder as reason:
            warnings.warn(f"the step is not saved: {reason}", stacklevel=2)
        except OSError as failure:
            warnings.warn(f"the step is not saved in {self.folder.path}: {failure.strerror}", stacklevel=2)
        return False


def files_of(program: StepProgram, request: Request) -> dict[str, bytes]:
    """The files of a rewritten program. Raises `NotSavable`."""
    writer = Writer(request.own, request.captured)
    written = {"program": writer.program(program), "constants": [len(data) for data in writer.constants]}
    files: dict[str, bytes] = {"captured.txt.gz": gzip.compress(request.text.encode(), mtime=0)}
    written["reports"] = {name: encode_reports(step) for name, step in program.graphs.items()}
    written["log"] = [dataclasses.asdict(report) for report in program.log]
    written["pieces"] = {}
    for name, step in program.graphs.items():
        if step.executable is not step.module:
            calls, pieces = _pieces(step)
            written["pieces"][name] = [[call.name, call.nodes] for call in calls]
            files |= {f"{name}.{piece}": data for piece, data in pieces.items()}
    written["live"] = request.live = writer.live
    files["constants"] = b"".join(writer.constants)
    files["program.json"] = json.dumps(written, separators=(",", ":")).encode()
    return files


def _pieces(step: StepGraph) -> tuple[list[PieceCall], dict[str, bytes]]:
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


def program_of(
    entry: Entry, own: torch.device | None, tensor: Callable, live: Any, mesh: Any, outcome: Outcome
) -> StepProgram:
    """The program of an entry, bound to live tensors. ``tensor``, ``live``: see `Reader`.
    Raises `NotLoadable`."""
    saved = entry.program
    constants, at = [], 0
    for size in saved["constants"]:
        constants.append(entry.files["constants"][at : at + size])
        at += size
    reader = Reader(own, constants, tensor, live)
    program = reader.program(saved["program"], mesh, saved["pieces"])
    # Triton's cache is another's on another machine or GPU, and may have been emptied.
    ahead = Ahead(step.graph for step in program.graphs.values())
    ahead.start()
    for name, step in program.graphs.items():
        if name in saved["pieces"]:
            calls = [PieceCall(piece, tuple(nodes)) for piece, nodes in saved["pieces"][name]]
            pieces = {c.name: entry.files[f"{name}.{c.name}"] for c in _distinct(calls)}
            functions = {piece: compat.inductor_load(data) if data else None for piece, data in pieces.items()}
            step.executable = with_functions(step.module, calls, functions)
        decode_reports(saved["reports"][name], step)
    program.log = list(map(decode_report, saved["log"]))
    outcome.notes += ahead.finish()
    return program


def axes_of(entry: Entry) -> list[str]:
    """The names that its graphs give process groups."""
    graphs = entry.program["program"]["graphs"].values()
    return list(dict.fromkeys(name for step in graphs for name in step["axes"]))


def _distinct(calls: Sequence[PieceCall]) -> list[PieceCall]:
    return list({call.name: call for call in calls}.values())


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def _gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
