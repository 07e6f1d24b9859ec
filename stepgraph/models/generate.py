"""Text from a model, token by token, with a key-value cache."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from stepgraph.models.decoder import LayerCache
from stepgraph.models.transformers import CausalLM

#: Logits (V,) fp32 on the CPU -> the next token.
Choose = Callable[[torch.Tensor], int]
#: Below this temperature only the most likely token has a share that fp32 distinguishes from 0, and logits may
#: overflow.
_GREEDY = 1e-30


@torch.no_grad()
def generate(model: nn.Module, prompt: list[int], n: int, choose: Choose, stop: Collection[int] = ()) -> Iterator[int]:
    """Up to ``n`` tokens after ``prompt``, until one of ``stop``, which is not given out.

    ``model`` is one of `stepgraph.models`, best in evaluation mode; the prompt runs once, then a token at a time. One
    of transformers generates by itself. Raises ``ValueError`` for an empty prompt.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; use at least one, such as the token that begins a text")
    if isinstance(model, CausalLM):
        yield from model.generate(prompt, n, choose, stop)
        return
    device = model.embed.weight.device
    cache = [LayerCache(len(prompt) + n) for _ in model.layers]
    tokens = prompt
    for _ in range(n):
        logits = model(torch.tensor([tokens], device=device), cache)[0, -1]
        token = choose(logits.float().cpu())
        if token in stop:
            return
        yield token
        tokens = [token]


def sampler(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Choose:
    """Draws from the softmax of ``logits / temperature``, of the most likely tokens that together have ``top_p``.

    With temperature 0, or next to nothing, the most likely token. Drawn on the CPU: a seed gives the same everywhere.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1 (nucleus sampling).
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        if temperature < _GREEDY:
            return int(logits.argmax())
        probability, order = (logits / temperature).softmax(dim=0).sort(descending=True, stable=True)
        before = probability.cumsum(dim=0) - probability  # the mass of likelier tokens: the first is always in
        kept = probability.masked_fill((before >= top_p) & (before > 0), 0.0)
        return int(order[torch.multinomial(kept, 1, generator=generator)])

    return choose
