"""Your own model in your own loop: one line captures the step, one line per batch runs it.

CPU, a few seconds:    python examples/own_loop.py
GPU, the same script:  python examples/own_loop.py --device cuda --steps 200
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import stepgraph


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT with a tied head."""

    def __init__(self, vocab: int = 256, dim: int = 64, layers: int = 2, heads: int = 4, length: int = 64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) int64 -> (B, T, vocab) logits
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1).float(), batch["targets"].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--passes", default="exact", choices=("exact", "default"))
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()

    def batch() -> dict[str, torch.Tensor]:
        starts = torch.randint(len(text) - 65, (8,))
        rows = torch.stack([text[start : start + 65] for start in starts.tolist()]).to(args.device)
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    step = stepgraph.capture(model, loss_fn, batch(), optimizer, max_grad_norm=1.0, passes=args.passes)
    for number in range(1, args.steps + 1):
        loss = step(batch())  # forward, loss, backward, clipping and update: one graph
        if number == 1 or number % 10 == 0:
            print(f"step {number}: loss {loss.item():.4f}, grad_norm {step.metrics['grad_norm'].item():.2f}")
    print(step.verify(batch()))  # eager and the captured step from one state, compared


if __name__ == "__main__":
    main()
