"""The step program of one rank of a pipeline: its stages' graphs, sends and receives, and the calls of its schedule."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.errors import CaptureError
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import Provenance, Role, set_provenance
from stepgraph.graph.stages import Cut, pieces_of
from stepgraph.graph.step_graph import Call, InputSpec, Kind, StepGraph, graph_name
from stepgraph.graph.values import Loss, Output, Parameter, TotalLoss, Value
from stepgraph.kernels.comm import stage_sends  # noqa: F401  (registers its operators)
from stepgraph.parallel.pipeline.layout import Pipeline, channel_name
from stepgraph.parallel.pipeline.messages import Channel, calls_of, places_of
from stepgraph.parallel.pipeline.schedules import with_once, work_of
from stepgraph.parallel.pipeline.timeline import most_in_flight

c10d, ours = torch.ops._c10d_functional, torch.ops.stepgraph


class StageGraphs:
    """What a rank of ``pipeline`` runs of one of ``microbatches`` microbatches, whose graph, of all stages, is
    ``microbatch``. All stages count as many microbatches in flight as the fullest rank, so that they stay balanced.

    ``whole``: the graph of each of its stages, forward and backward, by name: what passes rewrite that look at both.
    `program` then cuts it into what the schedule calls.
    """

    def __init__(self, microbatch: StepGraph, pipeline: Pipeline, microbatches: int):
        self.pipeline, self.cut = pipeline, Cut(microbatch, pipeline.starts)
        self.capture_s = microbatch.capture_s
        self.loss = next(node.meta["val"] for node, what in microbatch.returned() if isinstance(what, Loss))
        self.whole = {stage: self.cut.graph_of(stage) for stage in pipeline.own}
        self.microbatches = microbatches
        in_flight = most_in_flight(pipeline.name, pipeline.ranks, microbatches) if microbatches > 1 else 1
        for stage, step in self.whole.items():
            step.in_flight, step.stage = in_flight, stage
            for _, what in step.bound():
                if isinstance(what, Parameter) and not pipeline.holds(what.path):
                    raise CaptureError(
                        f"stage {stage} reads {what.path}, which its rank does not hold: pass plan_pipeline the "
                        "loss_fn and a batch of the form that the step is captured with"
                    )

    def pieces(self) -> dict[str, StepGraph]:
        """The graphs that compute for one microbatch, by name."""
        return {
            graph_name(kind, stage): piece
            for stage, step in self.whole.items()
            for kind, piece in pieces_of(step, stage, self.pipeline.schedule.halves).items()
        }

    def once(self) -> dict[str, StepGraph]:
        """The graphs that passes made to run once for all microbatches, by name."""
        return {
            graph_name(kind, stage): graph for stage, step in self.whole.items() for kind, graph in step.once.items()
        }

    def program(self, pieces: dict[str, StepGraph], update: StepGraph) -> StepProgram:
        """The program of a step. ``pieces``: see `pieces` and `once`."""
        pipeline = self.pipeline
        gathered, reduced = (
            {stage for stage in pipeline.own if graph_name(kind, stage) in pieces}
            for kind in (Kind.GATHER, Kind.REDUCE)
        )
        orders = with_once(work_of(pipeline.name, pipeline.ranks, self.microbatches), gathered, reduced)
        calls, boxes = self._calls(orders)
        graphs = dict(pieces)
        for call in calls:
            if call.graph not in graphs:
                graphs[call.graph] = self._message(call, boxes)
        graphs |= {graph_name(Kind.SHARE_LOSS): self._share_loss(), graph_name(Kind.UPDATE): update}
        next(iter(graphs.values())).capture_s = self.capture_s
        return StepProgram(graphs, [*calls, Call(Kind.SHARE_LOSS), Call(Kind.UPDATE)])

    def forward_program(self) -> StepProgram:
        """The program of forward alone, for one batch, where the microbatch's graph has no backward."""
        pipeline, where = self.pipeline, self.pipeline.ranks_of
        graphs = {graph_name(Kind.FORWARD, stage): step for stage, step in self.whole.items()}
        ranks = range(pipeline.ranks)
        orders = [
            [Call(Kind.FORWARD, stage, 0) for stage, holder in enumerate(where) if holder == rank] for rank in ranks
        ]
        calls, boxes = self._calls(orders)
        graphs |= {call.graph: self._message(call, boxes) for call in calls if call.graph not in graphs}
        return StepProgram(graphs | {graph_name(Kind.SHARE_LOSS): self._share_loss()}, [*calls, Call(Kind.SHARE_LOSS)])

    def _calls(self, orders: Sequence[Sequence[Call]]) -> tuple[list[Call], dict[Channel, list[int]] | None]:
        """(this rank's calls, the boxes of all messages where they go over symmetric memory); see `calls_of`."""
        pipeline = self.pipeline
        every = calls_of(orders, pipeline.ranks_of, pipeline.symmetric)
        return every[pipeline.rank], self._boxes(every) if pipeline.symmetric else None

    def _boxes(self, calls: list[list[Call]]) -> dict[Channel, list[int]]:
        """The box of each channel's messages, for `stage_sends`. ``calls``: those of every rank."""
        stages = range(len(self.pipeline.ranks_of))
        messages = [self.cut.message(stage, forward) for stage in stages for forward in (True, False)]
        most = max(map(len, messages))
        nbytes = max(-(-tensor_bytes(value) // 16) * 16 for message in messages for value in message)
        boxes, room = {}, [0] * self.pipeline.ranks
        for channel, places in sorted(places_of(calls, self.pipeline.ranks_of).items()):
            boxes[channel] = [room[channel.receiver], places * most]
            room[channel.receiver] += places * most
        return {channel: [*box, max(room), nbytes] for channel, box in boxes.items()}

    def _message(self, call: Call, boxes: dict[Channel, list[int]] | None) -> StepGraph:
        """The graph of ``call``, which sends or receives a stage's message. ``boxes``: those of messages over symmetric
        memory."""
        forward, sends, here = call.kind.forward, call.kind.sends, call.stage
        there = here + (1 if forward == sends else -1)
        values = self.cut.message(there if sends else here, forward)
        phase = "forward" if forward else "backward"
        where, channel = self._route(forward, sends, self.pipeline.ranks_of[there], boxes)
        graph, results = fx.Graph(), []
        inputs, outputs = [], []
        for value in values:
            like = value.meta["val"]
            if sends:
                source = graph.placeholder(value.name)
                source.meta["val"] = like
                inputs.append(InputSpec(Value(value.name)))
                node = graph.call_function(ours.send.default, (source, *where))
                node.meta["val"] = like.new_empty(0)
            else:
                form = (list(like.shape), list(like.stride()), like.dtype, like.device)
                node = graph.call_function(ours.recv.default, (*form, *where))
                node.meta["val"] = like
                outputs.append(Value(value.name, arriving=boxes is None))
                results.append(node)
            set_provenance(node, Provenance("", phase, "", role=Role("send" if sends else "recv", (), "pp")))
        return _step(graph, results, inputs, outputs, {channel: "pp"})

    def _route(
        self, forward: bool, sends: bool, peer: int, boxes: dict[Channel, list[int]] | None
    ) -> tuple[tuple[Any, ...], str]:
        """(the last arguments of the operator that sends to ``peer`` or receives from it, its process group's name)."""
        pipeline = self.pipeline
        if boxes is not None:
            name = compat.name_group(pipeline.group, "pp")
            ends = (pipeline.rank, peer) if sends else (peer, pipeline.rank)
            return (peer, boxes[Channel(forward, *ends)], name), name
        up = (peer > pipeline.rank) == sends
        name = compat.name_group(pipeline.channels[up], channel_name(up))
        return (peer, None, name), name

    def _share_loss(self) -> StepGraph:
        """The last stage's loss, to all stages: a sum with the others' zeros."""
        graph = fx.Graph()
        group = compat.name_group(self.pipeline.group, "pp")
        node = graph.placeholder("loss")
        node.meta["val"] = self.loss
        for target, args in ((c10d.all_reduce.default, ("sum", group)), (c10d.wait_tensor.default, ())):
            node = graph.call_function(target, (node, *args))
            node.meta["val"] = self.loss
            set_provenance(node, Provenance("", "optimizer", ""))
        return _step(graph, [node], [InputSpec(Loss())], [TotalLoss()], {group: "pp"})


def _step(
    graph: fx.Graph, results: list[fx.Node], inputs: list[InputSpec], outputs: list[Output], axes: dict[str, str]
) -> StepGraph:
    graph.output(results)
    return StepGraph(compat.lazy_graph_module({}, graph), inputs, outputs, axes=axes)
