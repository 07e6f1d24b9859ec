"""Context parallelism of transformers' models, through their interface of attention functions.

Every rank gives the model the whole batch, as one process would. A hook before the model's forward takes this rank's
part of tokens, positions and labels (each token's label is the next one before parts are taken), and makes the mask of
all tokens where the batch or the context asks for one. Attention functions let it see all tokens (see
`stepgraph.parallel.context`). The logits are of this rank's part; the mean of the ranks' losses is that of one process.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.models.documents import HIDDEN, PLACE
from stepgraph.models.loss import IGNORE
from stepgraph.parallel.context_ranks import ContextRanks

_NAME = "stepgraph_context"
#: The attribute of every module of a model of transformers that has its `stepgraph.parallel.context.ContextRanks`.
CONTEXT = "_stepgraph_context"
_TOKENS = ("input_ids", "position_ids", "labels", "shift_labels")  # (B, T) each
_OTHER = ("attention_mask", "num_items_in_batch")


def models_of_transformers(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in ``model`` that are models of transformers."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from models_of_transformers(child)


def share(model: nn.Module, context: ContextRanks) -> None:
    """Let the ranks of ``context`` share the sequences of ``model``, of transformers. ``ValueError`` for a model with
    layers that mix tokens otherwise than by full attention."""
    from transformers import AttentionInterface

    kind, config = type(model).__name__, model.config.get_text_config()
    mixing = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    found = {
        "attention of its own form": not model._supports_attention_backend,
        "a state that passes from token to token": getattr(model, "_is_stateful", False),
        f"layers of {', '.join(mixing)}": bool(mixing),
        "a convolution over tokens": any(isinstance(m, nn.Conv1d) for m in model.modules()),
        "an encoder and a decoder": getattr(config, "is_encoder_decoder", False),
        "a loss of its routers (output_router_logits)": getattr(config, "output_router_logits", False),
    }
    for what, holds in found.items():
        if holds:
            raise ValueError(f"cp splits sequences, and {kind} has {what}, which needs all of its tokens: drop cp")
    AttentionInterface.register(_NAME, _attend)
    model.set_attn_implementation(_NAME)
    for module in model.modules():
        setattr(module, CONTEXT, context)
    model.register_forward_pre_hook(_take_part, with_kwargs=True)


def _take_part(model: nn.Module, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """What the model is called with, of this rank's part of the tokens."""
    context, place = getattr(model, CONTEXT), getattr(model, PLACE)
    given = dict(zip(("input_ids",), args[:1], strict=False)) | given
    more = [name for name, v in given.items() if isinstance(v, torch.Tensor) and name not in (*_TOKENS, *_OTHER)]
    if more or len(args) > 1 or "input_ids" not in given:
        raise ValueError(
            f"with cp, {type(model).__name__} takes input_ids and, by name, {', '.join((*_TOKENS[1:], *_OTHER))}, and "
            f"was given {', '.join(more) or 'others'}: leave them out, or drop cp"
        )
    tokens, positions, labels = (given.get(name) for name in _TOKENS[:3])
    all_places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    padding = given.get("attention_mask")
    starts = all_places if padding is not None else positions  # documents begin at 0
    starts = None if starts is None else starts.expand_as(tokens)
    mask = context.mask(tokens, starts, model.dtype, place)
    given["attention_mask"] = mask if padding is None else mask.masked_fill(~padding[:, None, None, :].bool(), HIDDEN)
    given["position_ids"] = all_places if positions is None else positions.expand_as(tokens)
    if labels is not None:
        if given.get("shift_labels") is None:
            given["shift_labels"] = F.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        count = given.get("num_items_in_batch")
        count = (given["shift_labels"] != IGNORE).sum() if count is None else count
        given["num_items_in_batch"] = count / context.ranks
    for name in _TOKENS:
        if given.get(name) is not None:
            given[name] = context.part(given[name], place)
    return (), given | {"use_cache": False}


def _attend(
    module: nn.Module,
    query: torch.Tensor,  # (B, H, T / P, d)
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # that of the context; None: causal where the module is
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:  # (B, T / P, H, d)
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}, which cp does not compute: drop cp")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups, masked = q.shape[1] // k.shape[1], attention_mask is not None
        if masked and groups > 1:  # kernels that take a mask know no groups of heads
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, attention_mask, dropout, causal and not masked, scale=scaling, enable_gqa=groups > 1 and not masked
        )

    context = getattr(module, CONTEXT)
    if context.chunks > 1 and (dropout or not causal):
        what = f"dropout={dropout}" if dropout else "tokens that see later ones"
        raise ValueError(f"{type(module).__name__} attends with {what}, not computed by context=gather: use ulysses")
    return context.attend(attention, query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
