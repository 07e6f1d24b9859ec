"""What ranks must have in common before a step runs: the model, the values of replicated parameters, and the order of
collectives in each process group. Ranks that differ would hang or diverge."""

import hashlib
import json
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from stepgraph import compat
from stepgraph.capture.batch import has_values
from stepgraph.graph.collectives import ALL_TO_ALL, RECV, SEND, group_of, operator_of
from stepgraph.graph.facts import argument
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import provenance, role_of
from stepgraph.parallel.apply import held_parameters
from stepgraph.parallel.fsdp import layouts
from stepgraph.parallel.mesh import Mesh
from stepgraph.parallel.ranks import Ranks
from stepgraph.parallel.world import said_if_long

#: Seconds between two looks into the store.
_POLL_S = 0.02
#: Letters of what an error shows: one bucket may hold hundreds of parameters.
_SHOWN = 160


class Group(NamedTuple):
    """What its ``ranks`` have in common, such as the ``collectives of dp_shard``; of messages sender and receiver."""

    name: str
    ranks: tuple[int, ...]


class Entry(NamedTuple):
    """``form``: what must be the same on all ranks. ``place``: where it comes from."""

    form: str
    place: str = ""

    def __str__(self) -> str:
        form = self.form if len(self.form) < _SHOWN else f"{self.form[:_SHOWN]} ..."
        return f"{form}, {self.place}," if self.place else form


Entries = Mapping[Group, Sequence[Entry]]
#: What ranks may differ in that could be the reason, as text, by name.
Facts = Callable[[], Mapping[str, str]]
#: For each model that ranks have compared, the collectives that they agreed on, as groups with digests; None before.
_AGREED: weakref.WeakKeyDictionary[nn.Module, set[tuple[Group, str]] | None] = weakref.WeakKeyDictionary()
#: How often this process has met the other ranks of a group in the store.
_MET: Counter[Group] = Counter()


def check_model(model: nn.Module, batch: Mapping[str, Any], also: Iterable[str], facts: Facts) -> bool:
    """Raise ``ValueError`` if ranks hold different parameters, or different values of a replicated one, as after
    different seeds, or differ in ``also``, or if ranks that share data have a different ``batch``, leaves by name. All
    ranks call it together. It checks a model only once, since ranks may capture later steps at different times. Whether
    it did."""
    if model in _AGREED or dist.get_backend() == "fake":
        return False
    parameters = (f"{name} {_form(p)}{'' if p.requires_grad else ', frozen'}" for name, p in model.named_parameters())
    everyone = Group("model", tuple(range(dist.get_world_size())))
    _require_alike({everyone: [Entry(form) for form in (*parameters, *also)]}, facts)
    _check_replicas(model)
    mesh = next((layout.mesh for layout in layouts(model).values() if isinstance(layout.mesh, Mesh)), None)
    if mesh is not None and mesh.spec.dp < mesh.spec.size:
        _check_batch(mesh, batch)
    _AGREED[model] = None  # not before: a model that is refused is checked again
    return True


def check_collectives(model: nn.Module, program: StepProgram, facts: Facts) -> None:
    """Raise ``ValueError`` unless the ranks of each group issue the same collectives in a step of ``program``.

    All ranks call it for the first step of ``model``. Later, each rank calls it before it runs a new form of the step.
    If the ranks have agreed on the form's collectives before, nothing is exchanged: one rank alone may get a batch of
    another length if only parameters and gradients are communicated. Otherwise the ranks of a group compare digests
    through the store, and each waits until the others are about to run a form of the step that is new to them.
    """
    if model not in _AGREED:
        return
    issued = {(group, _digest(entries)): entries for group, entries in collectives_of(program).items()}
    agreed = _AGREED[model]
    new = {group: entries for (group, digest), entries in issued.items() if (group, digest) not in (agreed or ())}
    if agreed is None:
        _require_alike(new, facts)
    else:
        _meet(new, facts)
    _AGREED[model] = (agreed or set()) | issued.keys()


def collectives_of(program: StepProgram) -> dict[Group, list[Entry]]:
    """What each group of ranks communicates in a step of ``program``, in order."""
    entries = {
        name: [*filter(None, (_issued(node, step.axes) for node in step.graph.nodes))]
        for name, step in program.graphs.items()
    }
    found: dict[Group, list[Entry]] = defaultdict(list)
    for call in program.schedule:
        for group, entry in entries[call.graph]:
            found[group].append(entry)
    return dict(found)


def _issued(node: fx.Node, axes: Mapping[str, str]) -> tuple[Group, Entry] | None:
    """What ``node`` communicates, and with whom; None where it communicates nothing. ``axes``: of the graph's names of
    groups, which differ from rank to rank where ranks have named other groups before."""
    found, message = operator_of(node), node.target in (SEND, RECV)
    if not message and (found is None or found.stage not in ("begin", "joined")):
        return None
    name, at = group_of(node), provenance(node)
    axis = axes.get(name, name)
    ranks = tuple(dist.get_process_group_ranks(compat.process_group(name)))
    if message:
        ends = dist.get_rank(), ranks[argument(node, "peer")]
        value = node.args[0] if node.target is SEND else node
        ends = ends if node.target is SEND else ends[::-1]
        return Group(f"messages of {axis}", ends), Entry(f"{_form(value.meta['val'])} from rank {ends[0]} to {ends[1]}")
    role = role_of(node)
    what = f" of {', '.join(role.parameters)}" if role and role.parameters else ""
    # Each rank chooses the sizes of its parts, and those of one rank may be equal where another's are not.
    uneven = node.target is ALL_TO_ALL
    forms = ", ".join(_form(source.meta["val"], uneven) for source in node.all_input_nodes)
    words = "".join(f" {arg}" for arg in node.args if isinstance(arg, str) and arg != name)
    form = f"{found.kind}{words} {forms}{what}"
    return Group(f"collectives of {axis}", ranks), Entry(form, f"{at.phase} of {at.place}" if at else "")


def _form(tensor: torch.Tensor, uneven: bool = False) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{['any', *tensor.shape[1:]] if uneven else [*tensor.shape]}"


def _digest(entries: Sequence[Entry]) -> str:
    return hashlib.sha256("\n".join(entry.form for entry in entries).encode()).hexdigest()


def _require_alike(own: Entries, facts: Facts) -> None:
    """Raise ``ValueError`` unless all ranks of each group have the same entries. All ranks call it together."""
    every = Ranks()
    digests = every.gather(lambda: {group: _digest(entries) for group, entries in own.items()})
    for group in dict.fromkeys(group for found in digests for group in found):
        if len({digests[rank].get(group) for rank in group.ranks}) > 1:
            found = every.gather(lambda: (own.get(group, ()), dict(facts())))  # noqa: B023
            raise _differ(group, {rank: found[rank] for rank in group.ranks})


def _meet(own: Entries, facts: Facts) -> None:
    """Raise ``ValueError`` unless the other ranks of each group come to the store with the same entries."""
    store = dist.PrefixStore("stepgraph/collectives", compat.default_store())
    names = {}
    for group, entries in own.items():
        names[group] = f"{group.name}/{group.ranks}/{_MET[group]}/"
        _MET[group] += 1
        store.set(f"{names[group]}{dist.get_rank()}", _digest(entries))
    for group, name in names.items():
        if len({_awaited(store, f"{name}{rank}", group, rank) for rank in group.ranks}) > 1:
            store.set(f"{name}{dist.get_rank()}/entries", json.dumps([own[group], dict(facts())]))
            found = {rank: json.loads(_awaited(store, f"{name}{rank}/entries", group, rank)) for rank in group.ranks}
            raise _differ(
                group, {rank: ([Entry(*one) for one in entries], why) for rank, (entries, why) in found.items()}
            )


def _awaited(store: dist.Store, key: str, group: Group, rank: int) -> bytes:
    """What ``rank`` writes. It looks again and again: a wait would keep other threads from the store."""
    begun = time.monotonic()
    why = f"rank {dist.get_rank()} has a form of the step with other {group.name}, and waits for"
    with said_if_long(f"{why} rank {rank} to have one too"):
        while not store.check([key]):
            if time.monotonic() - begun > store.timeout.total_seconds():
                raise ValueError(
                    f"{why} rank {rank}, which runs another: give all of {_ranks(group.ranks)} like batches"
                )
            time.sleep(_POLL_S)
    return store.get(key)


def _differ(group: Group, found: Mapping[int, tuple[Sequence[Entry], Mapping[str, str]]]) -> ValueError:
    """The error that names the first difference. ``found``: by rank its entries, and facts that may be the reason."""
    first, *others = group.ranks
    kinds = {rank: _digest(entries) for rank, (entries, _) in found.items()}
    other = next(rank for rank in others if kinds[rank] != kinds[first])
    (one, here), (two, there) = found[first], found[other]
    place = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a.form != b.form), min(len(one), len(two))
    )
    shown = [str(entries[place]) if place < len(entries) else "none" for entries in (one, two)]
    on = [_ranks([rank for rank in group.ranks if kinds[rank] == kinds[of]]) for of in (first, other)]
    reasons = [name for name in here | there if here.get(name) != there.get(name)]
    more = f"; they differ in {', '.join(reasons)}" if reasons else ""
    return ValueError(
        f"the ranks would hang: number {place + 1} of the {group.name} is {shown[0]} on {on[0]}, "
        f"and {shown[1]} on {on[1]}{more}; build the same model and the same step on all ranks"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _check_batch(mesh: Mesh, batch: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ranks that differ in ``tp``, ``cp`` or ``pp`` alone have different batches."""
    values = {name: _value(leaf) for name, leaf in batch.items()}
    every = Ranks().gather(lambda: (mesh.dp_place, values))
    readers: dict[int, int] = {}
    for rank, (place, found) in enumerate(every):
        first = readers.setdefault(place, rank)
        differing = [name for name in found | every[first][1] if found.get(name) != every[first][1].get(name)]
        if differing:
            raise ValueError(
                f"ranks {first} and {rank} share data, and {', '.join(differing)} differ: let a "
                "sampler take num_replicas=mesh.spec.dp and rank=mesh.dp_place, not the ranks of the world"
            )


def _value(leaf: Any) -> str:
    if not has_values(leaf):
        return "" if isinstance(leaf, torch.Tensor) else repr(leaf)
    flat = leaf.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return f"{_form(leaf)} {hashlib.sha256(flat.numpy()).hexdigest()}"


def _check_replicas(model: nn.Module) -> None:
    """Raise the error on every rank if any rank sees it; otherwise the remaining ranks would hang."""
    for name in filter(None, Ranks().gather(lambda: _differing_replica(model))):
        raise ValueError(
            f"ranks hold different values of {name}, and each would train its own; build the model from "
            "one seed on all ranks, by torch.manual_seed, or load the same checkpoint"
        )


@torch.no_grad()
def _differing_replica(model: nn.Module) -> str | None:
    """The first parameter of which the ranks that replicate it hold different values."""
    found = []
    held = {name: p for name, p in held_parameters(model).items() if p.is_floating_point() and p.dtype.itemsize > 1}
    shards = {name: p for name, p in held.items() if isinstance(p, DTensor)}
    for mesh in dict.fromkeys(p.device_mesh for p in shards.values()):
        for axis in range(mesh.ndim):
            alike = [n for n, p in shards.items() if p.device_mesh == mesh and p.placements[axis].is_replicate()]
            if not alike or mesh.size(axis) == 1:
                continue
            local = [shards[name].to_local() for name in alike]
            sums = torch.stack([t.sum(dtype=torch.float64) for t in local]).nan_to_num()
            norms = torch.stack([t.abs().sum(dtype=torch.float64) for t in local]).nan_to_num()
            range_ = torch.stack([sums, -sums])
            dist.all_reduce(range_, dist.ReduceOp.MAX, group=mesh.get_group(axis))
            found += [
                name for name, differs in zip(alike, (range_.sum(0) > 1e-9 * norms).tolist(), strict=True) if differs
            ]
    return found[0] if found else None
