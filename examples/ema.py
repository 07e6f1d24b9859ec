"""A moving average of the weights, kept by the step itself: `end_of_step` runs after the optimizer, in the same graph.

CPU, a few seconds:    python examples/ema.py
GPU, the same script:  python examples/ema.py --device cuda --steps 500
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F

import stepgraph


class Averaged(nn.Module):
    """A model next to the average of its weights over steps."""

    def __init__(self, model: nn.Module, decay: float):
        super().__init__()
        self.model, self.average, self.decay = model, copy.deepcopy(model).requires_grad_(False), decay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    @torch.no_grad()
    def end_of_step(self) -> dict[str, torch.Tensor]:
        """Move the average by a part of its distance from the weights, and return that distance."""
        pairs = list(zip(self.average.parameters(), self.model.parameters(), strict=True))
        for mean, weight in pairs:
            mean.lerp_(weight, 1 - self.decay)
        return {"distance": torch.stack([(mean - weight).norm() for mean, weight in pairs]).norm()}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Averaged(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), decay=0.98).to(args.device)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-2, fused=True)
    truth = torch.randn(8, 1, device=args.device)

    def batch(rows: int = 16, noise: float = 1.0) -> dict[str, torch.Tensor]:
        x = torch.randn(rows, 8, device=args.device)
        return {"x": x, "y": torch.sin(x @ truth) + noise * torch.randn(rows, 1, device=args.device)}

    step = stepgraph.capture(model, loss_fn, batch(), optimizer, passes="exact" if args.device == "cpu" else "default")
    for _ in range(args.steps):
        step(batch())
    print(f"distance of the average from the weights: {step.metrics['distance'].item():.3f}")
    print(step.verify(batch()))

    test = batch(4096, noise=0.0)
    with torch.no_grad():
        errors = [F.mse_loss(one(test["x"]), test["y"]).item() for one in (model.model, model.average)]
    print("error without noise: {:.4f} of the last weights, {:.4f} of the average".format(*errors))


if __name__ == "__main__":
    main()
