"""Is a change of the model still the same training? Compare eager with the captured step on your own batch.

CPU, a few seconds:    python examples/verify_change.py
GPU, the same script:  python examples/verify_change.py --device cuda

`step.verify(batch, locate=True)` runs both from one state, puts everything back, and names the first node that differs.
"""

import argparse

import torch
from torch import nn

import stepgraph


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.RMSNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 16, device=args.device), "y": torch.randint(4, (8,), device=args.device)}
    for passes in ("exact", stepgraph.StepOptions(norm="kernel", inductor="off")):
        model = Model().to(args.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = stepgraph.capture(
            model,
            lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
            batch,
            optimizer,
            max_grad_norm=1.0,
            passes=passes,
        )
        print(f"passes={passes if isinstance(passes, str) else 'norm by our kernel'}:")
        print(step.verify(batch, locate=True))


if __name__ == "__main__":
    main()
