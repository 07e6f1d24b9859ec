"""Where a model's stages are: the blocks of each stage, the rank that runs it, and who holds which parameter."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import fx, nn

from stepgraph import compat
from stepgraph.capture.gradients import Share
from stepgraph.capture.step_trace import LossFn
from stepgraph.capture.trace import trace_forward
from stepgraph.costs.roofline import node_seconds
from stepgraph.errors import unknown_name
from stepgraph.graph.collectives import spans_machines
from stepgraph.graph.facts import is_view
from stepgraph.graph.stages import Cut
from stepgraph.graph.step_graph import Call, StepGraph
from stepgraph.graph.values import Parameter
from stepgraph.parallel.mesh import Mesh
from stepgraph.parallel.pipeline.schedules import rank_of, schedule_named
from stepgraph.parallel.ranks import Ranks

#: How messages are sent between stages, by the name that options use: through torch's process groups (NCCL, gloo), or
#: within a machine into the memory of the stage that reads them (see `stepgraph.kernels.comm.stage_sends`).
SENDS = ("point-to-point", "symmetric")


class Pipeline:
    """The stages of a model on the ``pp`` axis of ``mesh``, run by the schedule ``name``.

    ``starts``: of each stage, the number of its first block. ``readers``: for each parameter, by name, the stages that
    read it. ``ranks_of``: the rank of each stage; ``own``: the stages of this rank. ``sends``: one of ``SENDS``. Every
    rank of the mesh makes it at the same time: its process groups are made with it.

    Raises ``ValueError`` for ``symmetric`` sends between machines.
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        starts: Sequence[int],
        readers: dict[str, tuple[int, ...]],
        sends: str = "point-to-point",
    ):
        if sends not in SENDS:
            raise unknown_name("stage_sends", sends, SENDS)
        self.mesh, self.name, self.schedule = mesh, name, schedule_named(name)
        self.symmetric = sends == "symmetric"
        self.ranks, self.rank = mesh.spec.pp, mesh.place("pp")
        self.starts, self.readers = tuple(starts), readers
        self.ranks_of = [rank_of(self.schedule, self.ranks, stage) for stage in range(len(starts))]
        self.own = [stage for stage, rank in enumerate(self.ranks_of) if rank == self.rank]
        self.holders = {
            name: tuple(sorted({self.ranks_of[stage] for stage in stages})) for name, stages in readers.items()
        }
        self.group = mesh.axis("pp").get_group()
        if self.symmetric and (apart := spans_machines(self.group.group_name)):
            raise ValueError(f"stage_sends=symmetric over pp={self.ranks}: {apart}; make pp smaller, or use {SENDS[0]}")
        # Messages that go one way have a group, in which NCCL makes a communicator for each two ranks when they first
        # use it: in one group for both ways a send would wait for a receive that is posted before it, see `messages`.
        if not self.symmetric and (device := dist.group.WORLD.bound_device_id) is not None:
            raise ValueError(
                f"the process groups were opened with device_id={device}, and each would send the messages of all "
                "stages one by one: leave device_id out of init_process_group, or use stage_sends=symmetric"
            )
        with compat.single_gloo_thread():
            ways = () if self.symmetric else (True, False)
            self.channels = {up: self._group(channel_name(up)) for up in ways}
            self.tied = {holders: self._tied(holders) for holders in sorted(set(self.holders.values())) if holders[1:]}

    def _group(self, what: str) -> dist.ProcessGroup:
        """One more group of this rank's pipeline, which its ranks alone make."""
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=what)

    def _tied(self, holders: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the ranks of this rank's pipeline that hold a parameter; every rank makes the groups of all
        pipelines."""
        pipelines = self.mesh.spec.size // self.ranks
        every = [[first + place * pipelines for place in holders] for first in range(pipelines)]
        return dist.new_subgroups_by_enumeration(every, group_desc=tied_name(holders))[0]

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return len(self.starts)

    def holds(self, name: str) -> bool:
        """Whether this rank holds the parameter ``name``."""
        return self.rank in self.holders[name]

    def sender(self, receive: Call) -> str:
        """The sender of this rank's call ``receive``, such as ``stage 1 on rank 4``."""
        source = receive.stage + (-1 if receive.kind.forward else 1)
        return f"stage {source} on rank {dist.get_process_group_ranks(self.group)[self.ranks_of[source]]}"

    def named_groups(self) -> dict[str, dist.ProcessGroup]:
        """Its process groups by the names that graphs give them, where no other pipeline has these."""
        named = {channel_name(up): group for up, group in self.channels.items()}
        named |= {tied_name(holders): group for holders, group in self.tied.items() if group is not None}
        return {"pp": self.group} | named

    def __str__(self) -> str:
        starts = ", ".join(map(str, self.starts))
        return f"pipeline {self.name}: {self.stages} stages on {self.ranks} ranks, their first blocks {starts}"

    def share(self) -> Share:
        """This rank's part, for capture."""
        return Share(self.holders, self.rank, self.group, self.tied)

    def __deepcopy__(self, memo: dict) -> "Pipeline":
        return self  # as its mesh


def channel_name(up: bool) -> str:
    """What graphs call the group for messages to higher ranks, or to lower ones; it is also the group's description."""
    return f"pp.{'up' if up else 'down'}"


def tied_name(holders: Sequence[int]) -> str:
    """What graphs call the group of the ``holders`` of tied parameters; it is also the group's description."""
    return f"pp.tied.{'-'.join(map(str, holders))}"


def plan_pipeline(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    mesh: Mesh,
    schedule: str = "1f1b",
    split: Sequence[int] | None = None,
    stage_sends: str = "point-to-point",
) -> Pipeline:
    """Cut ``model`` into the stages of ``schedule`` on the ``pp`` axis of ``mesh``; give the result to `parallelize`.

    Rank 0 traces forward, on tensors without values, to see what each block costs and which parameters it reads. Every
    rank calls this and gets the same plan.

    Args:
        model: before `parallelize`; it may be on the meta device.
        loss_fn, batch: as on one rank that holds the whole model: ``loss_fn(model, batch)`` for a microbatch.
        split: the first block of each stage, from 0 upwards, such as ``(0, 9, 17, 25)``; None: the most even cut by
            cost, with embedding, head and loss counted.
        stage_sends: how stages send messages: ``point-to-point`` through torch's process groups, or within a machine
            over ``symmetric`` memory (see `stepgraph.kernels.comm.stage_sends`).

    Raises ``ValueError`` where the model has fewer blocks than stages, the split does not fit, or symmetric sends would
    go to another machine.
    """

    def plan() -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
        step = trace_forward(model, loss_fn, batch).step
        wanted = mesh.spec.pp * schedule_named(schedule).chunks
        starts = tuple(split) if split is not None else even_starts(step, mesh.spec.pp, schedule)
        check_split(starts, len(step.blocks), wanted, schedule, mesh.spec.pp)
        cut = Cut(step, starts)
        readers = {name: (0,) for name, _ in model.named_parameters()}  # what nothing reads is with the first stage
        for node, what in step.bound():
            if isinstance(what, Parameter) and (found := _readers(node, cut)):
                readers[what.path] = tuple(sorted(found))
        return starts, readers

    simulated = dist.get_backend() == "fake"  # the other ranks do not exist
    return Pipeline(mesh, schedule, *Ranks(alone=simulated).first(plan), stage_sends)


def check_blocks(blocks: int, ranks: int, schedule: str) -> None:
    """``ValueError``, in one line, where ``blocks`` are too few for ``schedule`` on ``ranks`` ranks."""
    chunks = schedule_named(schedule).chunks
    if blocks >= ranks * chunks:
        return
    most = blocks // chunks
    fixes = ["1f1b, which has one on each rank"] if blocks >= ranks else []
    fixes += [f"pp={most}"] if most > 1 else []
    raise ValueError(
        f"the model has {blocks} block{'s' * (blocks > 1)} and the schedule {schedule} on pp={ranks} has "
        f"{ranks * chunks} stages: " + ("try " + " or ".join(fixes) if fixes else "drop pp from the mesh")
    )


def check_split(starts: Sequence[int], blocks: int, stages: int, schedule: str, ranks: int) -> None:
    """``ValueError``, in one line, unless ``starts`` cut ``blocks`` blocks into ``stages`` stages."""
    given = ",".join(map(str, starts))
    if len(starts) != stages:
        count = f"{len(starts)} stage{'s' * (len(starts) > 1)}"
        raise ValueError(
            f"split={given} has {count} and the schedule {schedule} on pp={ranks} has {stages}: "
            f"list the first block of each of the {stages} stages, or leave split out"
        )
    if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)) or starts[-1] >= blocks:
        raise ValueError(
            f"split={given} does not fit {blocks} blocks: begin with 0 and give growing numbers below {blocks}"
        )


def even_starts(step: StepGraph, ranks: int, schedule: str) -> tuple[int, ...]:
    """The first block of each stage of ``schedule`` such that the slowest stage is as fast as can be. ``step``: the
    graph of the whole model. ``ValueError`` where the model has fewer blocks than stages."""
    blocks, stages = len(step.blocks), ranks * schedule_named(schedule).chunks
    check_blocks(blocks, ranks, schedule)
    costs, before, after = _block_seconds(step)
    costs[0] += before
    costs[-1] += after
    total = [0.0, *itertools.accumulate(costs)]
    # best[n][k]: (seconds of the slowest stage, where the last one begins) of the first n blocks in k stages.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for n in range(1, blocks + 1):
        best.append({})
        for k in range(1, min(n, stages) + 1):
            found = ((max(best[m][k - 1][0], total[n] - total[m]), m) for m in range(k - 1, n) if k - 1 in best[m])
            best[n][k] = min(found)
    starts, end = [], blocks
    for k in range(stages, 0, -1):
        end = best[end][k][1]
        starts.append(end)
    return tuple(reversed(starts))


def _block_seconds(step: StepGraph) -> tuple[list[float], float, float]:
    """(seconds of each block's forward, of the part before the first block, of the part after the last)."""
    number = {block: i for i, block in enumerate(step.blocks)}
    costs, outside, seen = [0.0] * len(number), [0.0, 0.0], False
    for node in step.nodes():
        seconds = 0.0 if is_view(node) else node_seconds(node)
        block = step.block_of(node)
        if block is None:
            outside[seen] += seconds
        else:
            costs[number[block]] += seconds
            seen = True
    return costs, *outside


def _readers(node: fx.Node, cut: Cut) -> set[int]:
    """The stages that read ``node``, by views of it too."""
    found, queue = set(), [node]
    while queue:
        for user in queue.pop().users:
            if user in cut.stage:
                found.add(cut.stage[user])
            elif user in cut.free:
                queue.append(user)
    return found
