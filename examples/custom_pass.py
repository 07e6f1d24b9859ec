"""A pass of your own, out of tree: registered by public names, checked and reported like the built-in ones.

CPU, a few seconds:    python examples/custom_pass.py
GPU, the same script:  python examples/custom_pass.py --device cuda

The pass replaces `x * 2` by `x + x`, which has the same bits. Its tier is therefore `exact`: `step.verify` must find no
difference, and the runner checks that every node's recorded shape, dtype and strides still follow from its inputs.
"""

import argparse

import torch
from torch import nn

import stepgraph
from stepgraph.passes import PassReport, default, register

MUL, ADD = torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor


@register("double_by_addition", "exact")
def double_by_addition(step: stepgraph.StepGraph, options: object, report: PassReport) -> None:
    """Replace products with 2 by sums."""
    for node in step.graph.find_nodes(op="call_function", target=MUL):
        report.matched += 1
        if node.args[1] == 2 and isinstance(node.args[0], torch.fx.Node):
            node.target, node.args = ADD, (node.args[0], node.args[0])
            report.changed += 1
    report.summary = f"{report.changed} of {report.matched} products became sums"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, batch = Model().to(args.device), torch.randn(4, 8, device=args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes = ["double_by_addition", *[p for p in default() if p.tier == "exact"]]
    step = stepgraph.capture(model, lambda model, x: model(x).square().mean(), batch, optimizer, passes=passes)
    print(step.report[0].line())
    print(step.verify(batch))


if __name__ == "__main__":
    main()
