"""`PadToLengths`: a collate function whose batches have a few lengths, so that few forms of a step are captured.

Padding goes to the right, whatever side the collate function pads. It changes neither loss nor gradients where labels
are -100 and no token sees it: in a causal model no token sees a later one, in any other the mask hides it. Sums over
other numbers of zeros may round differently.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.errors import require_type

IGNORED = -100  # what cross entropy leaves out

#: What the tensors of a batch are padded with, by their names in transformers. ``position_ids`` count on.
FILL: dict[str, float] = {
    "attention_mask": 0,
    "completion_mask": 0,
    "decoder_attention_mask": 0,
    "decoder_input_ids": 0,
    "inputs_embeds": 0.0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
    "special_tokens_mask": 1,
    "token_type_ids": 0,
}
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class PadToLengths:
    """Pads every batch to the next of ``lengths``, along the second dimension of its tensors (batch, length, ...).

    Give it to a ``DataLoader`` as ``collate_fn``, to a ``Trainer`` as ``data_collator``, or call it on a batch.

    Args:
        lengths: the lengths that batches may have.
        collate: makes a batch of examples; None: the argument is already a batch.
        causal: no token of the model sees a later one (GPT, Llama, Qwen). Then a batch needs no attention mask, and
            one that hides only padding on the right is left out, because attention is faster without; that of TRL's
            preference pairs (with a ``completion_mask``) stays, because their loss reads it. Keep the default for other
            losses that do, such as the balance of a mixture of experts.
        pad_token_id: the padding of ``input_ids``.
        fill: the padding of other tensors by name, or of the names in `FILL`; None: that tensor is not padded.

    Each tensor is padded from its own length, so that an encoder's inputs and a decoder's labels may differ. Tensors of
    one dimension and other values are left unchanged. Dropout draws other numbers for another length.

    Raises:
        ValueError: lengths that are not positive; for a batch: one longer than the largest length, one in which tokens
            would see the padding or the loss would count it, or a tensor that may need padding and has no ``fill``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        collate: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        causal: bool = False,
        pad_token_id: int = 0,
        fill: Mapping[str, float | None] | None = None,
    ):
        given = tuple(lengths) if isinstance(lengths, Iterable) else lengths
        if not given or not isinstance(given, tuple) or any(type(n) is not int or n < 1 for n in given):
            raise ValueError(f"lengths={given}: use positive integers, such as (256, 512, 1024)")
        self.lengths = tuple(sorted(set(given)))
        if collate is not None:
            require_type("collate", collate, Callable, "use a function from examples to a batch, or None")
        require_type("fill", fill or {}, Mapping, "use a number by the name of each tensor")
        self.collate, self.causal = collate, causal
        self.fill = {"input_ids": pad_token_id, "position_ids": 0, **FILL, **(fill or {})}
        self._of_tokens = {"input_ids", "position_ids", *FILL} - {"inputs_embeds"}

    def __call__(self, examples: Any) -> dict[str, Any]:
        """The batch of ``examples``, padded; a new dict."""
        batch = examples if self.collate is None else self.collate(examples)
        require_type("the batch", batch, Mapping, "let collate return a dict of tensors")
        batch = dict(batch)
        padded = {name: value for name, value in batch.items() if self._is_padded(name, value)}
        self._check(batch, padded)
        batch |= {name: self._pad(name, value) for name, value in padded.items()}
        if self.causal and _is_spare(batch):
            del batch["attention_mask"]
        return batch

    def _is_padded(self, name: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or self.fill.get(name) is None:
            return False
        return not (self.fill[name] == IGNORED and value.is_floating_point())  # one number for each class of a sequence

    def _check(self, batch: dict[str, Any], padded: dict[str, torch.Tensor]) -> None:
        packed = [name for name in _PACKED if name in batch]
        if packed:
            raise ValueError(
                f"the batch holds {packed[0]}, of sequences packed into one row: pad sequences or pack them"
            )
        lengths = {value.shape[1] for value in padded.values()}
        for name, value in batch.items():
            unknown = name not in self.fill and isinstance(value, torch.Tensor) and value.ndim > 1
            if unknown and value.shape[1] in lengths:
                raise ValueError(
                    f"{name} of shape {tuple(value.shape)} may need padding: say what follows it, "
                    f"fill={{{name!r}: 0}}, or that nothing does, fill={{{name!r}: None}}"
                )
        mask = batch.get("attention_mask")
        if mask is None and not self.causal:
            raise ValueError(
                "the batch has no attention_mask, so tokens would see the padding: use causal=True if no token of the "
                "model sees a later one, or let collate add the mask"
            )
        for name, value in padded.items():
            if value.ndim != 2 and name in self._of_tokens:
                raise ValueError(f"{name} of shape {tuple(value.shape)} cannot be padded: use one of (batch, length)")
        if not {"labels", "completion_mask"} & batch.keys() and not any(self.fill[name] == IGNORED for name in padded):
            raise ValueError(
                "the batch has no labels, so the loss would count the padding: let collate add labels, or name the "
                f"targets, fill={{'targets': {IGNORED}}}"
            )

    def longest(self, batches: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """The largest length of each tensor that is padded, by name."""
        found: dict[str, int] = {}
        for batch in batches:
            for name, value in batch.items():
                if self._is_padded(name, value):
                    found[name] = max(found.get(name, 0), value.shape[1])
        return found

    def lengthened(self, batch: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
        """``batch``, already padded, with the tensors named in ``lengths`` padded further."""
        return {
            name: self._fill_up(name, value, lengths[name]) if name in lengths else value
            for name, value in batch.items()
        }

    def _pad(self, name: str, value: torch.Tensor) -> torch.Tensor:
        length = value.shape[1]
        at = bisect_left(self.lengths, length)
        if at == len(self.lengths):
            raise ValueError(
                f"{name} of length {length} is longer than the largest of lengths={self.lengths}: add a larger one, or "
                f"truncate to {self.lengths[-1]}"
            )
        return self._fill_up(name, value, self.lengths[at])

    def _fill_up(self, name: str, value: torch.Tensor, length: int) -> torch.Tensor:
        missing = length - value.shape[1]
        if not missing:
            return value
        if name == "position_ids":  # counting on begins no new sequence
            further = torch.arange(1, missing + 1, dtype=value.dtype, device=value.device)
            return torch.cat([value, value[:, -1:] + further], dim=1)
        return F.pad(value, (0, 0) * (value.ndim - 2) + (0, missing), value=self.fill[name])


def _is_spare(batch: dict[str, Any]) -> bool:
    """Whether a causal model does without the mask: it hides what lies on the right, and no loss is taken there."""
    mask, targets = batch.get("attention_mask"), batch.get("labels")
    if mask is None or targets is None or targets.shape != mask.shape:
        return False
    on_the_right = bool((mask[:, 1:] <= mask[:, :-1]).all())
    return on_the_right and bool((targets[mask == 0] == IGNORED).all())
