"""Two models in one step: a student learns the distribution of a frozen teacher.

CPU, a few seconds:    python examples/distillation.py
GPU, the same script:  python examples/distillation.py --device cuda --steps 200

The teacher is part of the graph: it runs in forward, and no gradient, optimizer state or activation is kept for it.
"""

import argparse

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import stepgraph


class Pair(nn.Module):
    """A student next to its frozen teacher."""

    def __init__(self, student: nn.Module, teacher: nn.Module):
        super().__init__()
        self.student, self.teacher = student, teacher.eval().requires_grad_(False)


def loss_fn(pair: Pair, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean KL divergence of the student's distribution from the teacher's."""
    with torch.no_grad():
        target = pair.teacher(input_ids=batch["tokens"]).logits.log_softmax(-1)
    guess = pair.student(input_ids=batch["tokens"]).logits.log_softmax(-1)
    return F.kl_div(guess.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")


def llama(layers: int) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, num_hidden_layers=layers, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    pair = Pair(llama(layers=1), llama(layers=2)).to(args.device)
    optimizer = torch.optim.AdamW(pair.student.parameters(), lr=1e-3, fused=True)
    batch = {"tokens": torch.randint(256, (4, 32), device=args.device)}
    passes = "exact" if args.device == "cpu" else "default"
    step = stepgraph.capture(pair, loss_fn, batch, optimizer, passes=passes)
    for number in range(1, args.steps + 1):
        loss = step(batch)
        if number in (1, args.steps):
            print(f"step {number}: KL {loss.item():.5f}")


if __name__ == "__main__":
    main()
