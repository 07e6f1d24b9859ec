"""A step of several graphs: seconds add up, and state that a graph does not take lies next to it."""

import pytest
import torch

from stepgraph.costs.hardware import GPUS, LAUNCH_S, PRODUCTS_REACHED
from stepgraph.costs.roofline import Fusion, Roofline
from stepgraph.costs.step import graph_cost, step_cost
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.values import Accumulator, OptimizerState, Parameter
from tests.costs.graphs import Hand, aten

H200 = GPUS["h200"]


def microbatch():
    hand = Hand()
    w = hand.input(4096, 4096, dtype=torch.bfloat16, what=Parameter("w"))
    total = hand.input(4096, 4096, what=Accumulator("w"))
    x = hand.input(4096, 4096, dtype=torch.bfloat16)
    y = hand(aten.mm.default, x, w)
    g = hand(aten.mm.default, y, x, phase="backward")
    hand(aten.add_.Tensor, total, g, phase="backward", val=total.meta["val"])
    return hand.step()


def update():
    hand = Hand()
    w = hand.input(4096, 4096, dtype=torch.bfloat16, what=Parameter("w"))
    total = hand.input(4096, 4096, what=Accumulator("w"))
    m = hand.input(4096, 4096, what=OptimizerState("w", "exp_avg"))
    hand(aten.add_.Tensor, m, total, phase="optimizer", val=m.meta["val"])
    hand(aten.copy_.default, w, m, phase="optimizer", val=w.meta["val"])
    return hand.step()


def test_a_schedule_of_calls():
    parts = [graph_cost(step, H200, {}, fused=False) for step in (microbatch(), update())]
    whole = step_cost([(parts[0], 4), (parts[1], 1)])
    line = whole.timeline
    assert line.step_seconds == pytest.approx(4 * parts[0].timeline.step_seconds + parts[1].timeline.step_seconds)
    assert line.step_seconds == line.compute_seconds and line.exposed_seconds == 0
    assert whole.flops == 4 * 2 * 2 * 4096**3
    product = 2 * 4096**3 / 989.5e12 / PRODUCTS_REACHED
    assert parts[0].timeline.step_seconds > 2 * product
    size = 2 * 4096**2
    for moment in whole.moments:  # bf16 parameters, fp32 gradients and moments, in both graphs
        assert (moment.bytes["parameters"], moment.bytes["gradients"], moment.bytes["optimizer"]) == (
            *(size, 2 * size, 2 * size),
        )
    peak = max(whole.moments, key=lambda moment: moment.total)
    assert peak.phase == "backward" and peak.total == 6 * size + 2 * size  # the batch, y and g
    assert parts[0].moments[0].bytes["optimizer"] == 0


def test_one_call_is_the_graph():
    part = graph_cost(microbatch(), H200, {}, fused=True)
    assert step_cost([(part, 1)]).moments == part.moments


def test_every_kernel_takes_its_launch():
    step = microbatch()
    aliases = Aliases(step.graph)
    seconds = Roofline(step.graph, aliases, Fusion(step.graph, aliases, False), H200).seconds
    assert len(seconds) == 3
    cost = graph_cost(step, H200, {}, fused=False)
    assert cost.timeline.step_seconds == pytest.approx(sum(seconds.values()) + 3 * LAUNCH_S, rel=1e-9)
