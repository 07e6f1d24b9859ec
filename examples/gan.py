"""Two models that train against each other, each with its own optimizer, in one step.

CPU, a few seconds:    python examples/gan.py
GPU, the same script:  python examples/gan.py --device cuda --steps 2000

The step has one loss, the sum of both. Each model's part of it must reach only that model: the critic judges detached
samples, and the generator is judged by the critic with detached weights.
"""

import argparse
import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import stepgraph


class Players(nn.Module):
    """A generator of points in the plane, and a critic that scores points."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def loss_fn(players: Players, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The non-saturating losses of both players (Goodfellow et al., 2014)."""
    made = players.generator(batch["noise"])
    critic = F.softplus(-players.critic(batch["real"])).mean() + F.softplus(players.critic(made.detach())).mean()
    fixed = {name: weight.detach() for name, weight in players.critic.named_parameters()}
    generator = F.softplus(-functional_call(players.critic, fixed, (made,))).mean()
    stepgraph.metric("critic", critic)
    stepgraph.metric("generator", generator)
    return critic + generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    torch.manual_seed(0)
    players = Players().to(args.device)
    optimizers = [
        torch.optim.AdamW(players.generator.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=True),
        torch.optim.AdamW(players.critic.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=True),
    ]

    def batch(rows: int = 64) -> dict[str, torch.Tensor]:
        angle = 2 * math.pi * torch.rand(rows, device=args.device)
        circle = torch.stack([angle.cos(), angle.sin()], dim=1)
        return {"real": circle, "noise": torch.randn(rows, 8, device=args.device)}

    passes = "exact" if args.device == "cpu" else "default"
    step = stepgraph.capture(players, loss_fn, batch(), optimizers, passes=passes)
    for number in range(1, args.steps + 1):
        step(batch())
        if number in (1, args.steps):
            with torch.no_grad():
                radius = players.generator(batch(1024)["noise"]).norm(dim=1).mean().item()
            scores = ", ".join(f"{name} {step.metrics[name].item():.3f}" for name in ("critic", "generator"))
            print(f"step {number}: {scores}, mean radius {radius:.2f} (the circle's is 1)")
    print(step.verify(batch()))


if __name__ == "__main__":
    main()
