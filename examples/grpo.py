"""Group relative policy optimization: a policy learns from rewards of the answers that it has sampled itself.

CPU, a few seconds:    python examples/grpo.py
GPU, the same script:  python examples/grpo.py --device cuda --steps 200

Policy, frozen reference, loss, clipping and update are one captured step; answers are sampled between steps. Written
over whole logits: the pass `fuse_loss` computes log-probabilities, entropies and divergences in parts on a GPU.
"""

import argparse
import copy

import torch
import transformers
from torch import nn

import stepgraph

PROMPT, ANSWER, GROUP, VOCAB = 4, 6, 8, 32
CLIP, BETA, ENTROPY, TARGET = 0.2, 0.04, 0.001, 7


class Pair(nn.Module):
    """A policy next to its frozen reference."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)


def log_softmax(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """(B, ANSWER, V) fp32, of the distributions that the answers were drawn from."""
    return model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1].float().log_softmax(-1)


def loss_fn(pair: Pair, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Shao et al., 2024, equation 3, with the divergence from the reference in full, and a bonus for entropy."""
    logs, answers = log_softmax(pair.policy, batch["ids"]), batch["ids"][:, PROMPT:].unsqueeze(-1)
    with torch.no_grad():
        reference = log_softmax(pair.reference, batch["ids"])
    ratio = (logs.gather(-1, answers).squeeze(-1) - batch["old"]).exp()
    kl, entropy = (logs.exp() * (logs - reference)).sum(-1), -(logs.exp() * logs).sum(-1)
    gain = torch.min(ratio * batch["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantage"])
    stepgraph.metric("kl", kl.mean())
    stepgraph.metric("entropy", entropy.mean())
    return (BETA * kl - gain - ENTROPY * entropy).mean()


@torch.no_grad()
def sampled(policy: nn.Module, device: str, prompts: int = 4) -> tuple[dict[str, torch.Tensor], float]:
    """A batch of ``GROUP`` answers to each prompt, and their mean reward: the share of one token in an answer."""
    ids = torch.randint(VOCAB, (prompts, PROMPT), device=device).repeat_interleave(GROUP, 0)
    ids = policy.generate(ids, do_sample=True, top_k=0, min_new_tokens=ANSWER, max_new_tokens=ANSWER, pad_token_id=0,
                          attention_mask=torch.ones_like(ids))  # fmt: skip
    reward = (ids[:, PROMPT:] == TARGET).float().mean(1).view(prompts, GROUP)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    old = log_softmax(policy, ids).gather(-1, ids[:, PROMPT:].unsqueeze(-1)).squeeze(-1)
    return {"ids": ids, "old": old, "advantage": advantage.view(-1, 1)}, reward.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    pair = Pair(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))).to(args.device)
    optimizer = torch.optim.AdamW(pair.policy.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    batch, _ = sampled(pair.policy, args.device)
    passes = "exact" if args.device == "cpu" else "default"
    step = stepgraph.capture(pair, loss_fn, batch, optimizer, max_grad_norm=1.0, passes=passes)
    for number in range(1, args.steps + 1):
        batch, reward = sampled(pair.policy, args.device)
        step(batch)
        if number in (1, args.steps):
            shown = ", ".join(f"{name} {step.metrics[name].item():.3f}" for name in ("kl", "entropy"))
            print(f"step {number}: reward {reward:.3f}, {shown}")
    print(step.verify(batch))


if __name__ == "__main__":
    main()
