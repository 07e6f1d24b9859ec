"""Direct preference optimization: a policy learns which of two answers is better, next to its frozen reference.

CPU, a few seconds:    python examples/dpo.py
GPU, the same script:  python examples/dpo.py --device cuda --steps 200

Both models run in one step. The reference gets no gradient and keeps nothing for backward, and `token_log_probs` takes
the head in parts, so that the logits of all tokens never exist. TRL's trainer as captured steps: docs/integrations.md.
"""

import argparse
import copy

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import stepgraph
from stepgraph.kernels.loss import token_log_probs

PROMPT, ANSWER, BETA, VOCAB = 8, 8, 0.1, 64


class Pair(nn.Module):
    """A policy next to its frozen reference."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)


def log_probs(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B,): the log-probability of each row's answer."""
    hidden = model.model(input_ids=batch["ids"], use_cache=False).last_hidden_state[:, :-1]
    return token_log_probs(hidden, model.lm_head.weight, batch["labels"][:, 1:]).sum(1)


def loss_fn(pair: Pair, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rafailov et al., 2023, equation 7. The first half of the rows are chosen, the second rejected."""
    with torch.no_grad():
        reference = log_probs(pair.reference, batch)
    chosen, rejected = (BETA * (log_probs(pair.policy, batch) - reference)).chunk(2)
    stepgraph.metric("accuracy", (chosen > rejected).float().mean())
    stepgraph.metric("margin", (chosen - rejected).mean())
    return -F.logsigmoid(chosen - rejected).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    pair = Pair(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))).to(args.device)
    optimizer = torch.optim.AdamW(pair.policy.parameters(), lr=1e-3, weight_decay=0.0, fused=True)

    def batch(pairs: int = 8) -> dict[str, torch.Tensor]:
        """Prompts of random tokens; the better answer repeats the prompt, the other one is random."""
        prompt = torch.randint(VOCAB, (pairs, PROMPT))
        rows = [torch.cat([prompt, answer], 1) for answer in (prompt, torch.randint(VOCAB, (pairs, ANSWER)))]
        ids = torch.cat(rows).to(args.device)
        labels = ids.clone()
        labels[:, :PROMPT] = -100
        return {"ids": ids, "labels": labels}

    step = stepgraph.capture(pair, loss_fn, batch(), optimizer, passes="exact" if args.device == "cpu" else "default")
    for number in range(1, args.steps + 1):
        loss = step(batch())
        if number in (1, args.steps):
            shown = ", ".join(f"{name} {step.metrics[name].item():.3f}" for name in ("margin", "accuracy"))
            print(f"step {number}: loss {loss.item():.4f}, {shown}")
    print(step.verify(batch()))


if __name__ == "__main__":
    main()
