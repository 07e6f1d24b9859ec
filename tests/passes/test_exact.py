"""Passes declared exact are bitwise equal to eager: each alone, and all together, on every training case."""

import pytest
import torch

from stepgraph.passes import PASSES, Pass, configured
from stepgraph.passes.contract import NoOptions
from stepgraph.passes.memory.recompute import MemoryPolicy, Plan

aten = torch.ops.aten
#: Those over collectives have their own comparison, on ranks: see `tests/distributed/test_overlap.py`.
EXACT = [name for name, p in PASSES.items() if p.tier == "exact" and not p.needs_cuda and not p.needs_process_group]


@pytest.mark.parametrize("name", EXACT)
def test_each_exact_pass_alone(tools, case, name):
    tools.check_bitwise(case, [name], steps=3)


@pytest.mark.parametrize("policy", ["full", "selective", "budget"])
def test_all_exact_passes(tools, case, policy):
    """Ten steps. The budget lies half way between what ``none`` and ``full`` keep."""
    passes = configured("exact", memory="none" if policy == "budget" else policy)
    if policy == "budget":
        plan = Plan(tools.prepared(case)[1].step)
        kept = plan.kept_bytes(plan.dropped("full")), plan.kept_bytes(set())
        options = vars(MemoryPolicy("budget", 0.5 + 0.5 * kept[0] / kept[1], budget_is_fraction=True))
        passes = [p.with_options(**options) if p.name == "recompute" else p for p in passes]
    tools.check_bitwise(case, passes)


def test_the_comparison_finds_a_wrong_pass_declared_exact(tools):
    def apply(step, options, report):
        for node in step.nodes("forward"):
            if node.target is aten.mul.Tensor and isinstance(node.args[1], torch.fx.Node):
                with step.graph.inserting_after(node):
                    rounded = step.graph.call_function(aten.mul.Tensor, (node, 1 + 2**-23))
                rounded.meta.update(node.meta)
                node.replace_all_uses_with(rounded, delete_user_cb=lambda user, rounded=rounded: user is not rounded)
                return

    wrong = Pass("wrong", "exact", apply, "rounds otherwise", NoOptions())
    with pytest.raises(AssertionError, match="differs from eager"):
        tools.check_bitwise("llama", [wrong])
