"""An optimizer of your own: its `step()` is traced into the graph as you wrote it.

CPU, a few seconds:    python examples/custom_optimizer.py
GPU, the same script:  python examples/custom_optimizer.py --device cuda --steps 200

Lion keeps one moment per parameter and updates by its sign. Nothing is registered: `capture` runs `step()` on stand-ins
and puts what it does to tensors into the graph. `step.verify` compares the result with eager.
"""

import argparse
from collections.abc import Callable, Iterable

import torch
from torch import nn

import stepgraph


class Lion(torch.optim.Optimizer):
    """Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["moment"] = torch.zeros_like(param)
                moment = state["moment"]
                param.add_(torch.sign(moment * beta1 + param.grad * (1 - beta1)), alpha=-group["lr"])
                moment.mul_(beta2).add_(param.grad, alpha=1 - beta2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(args.device)
    optimizer = Lion(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    batch = {"x": torch.randn(32, 16, device=args.device), "y": torch.randint(4, (32,), device=args.device)}
    step = stepgraph.capture(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        batch,
        optimizer,
        max_grad_norm=1.0,
        passes="exact" if args.device == "cpu" else "default",
    )
    for number in range(1, args.steps + 1):
        loss = step(batch)
        schedule.step()
        if number in (1, args.steps):
            print(f"step {number}: loss {loss.item():.4f}")
    print(step.verify(batch))


if __name__ == "__main__":
    main()
