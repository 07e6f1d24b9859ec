"""`PackToBudget`: examples of any length in rows of one length, so that one capture serves every batch.

A packed row holds several documents, one after the other. Positions restart in each, the first token of a document is
no target, and attention stays within a document. What is left of a row is filled with documents of padding without
targets. A batch has one static shape: the boundaries are a tensor of fixed size.

    pack = PackToBudget(tokens=16384, max_length=4096)
    attend_within_documents(model)
    GraphTrainer(model=model, args=args, train_dataset=pack.dataset(examples), data_collator=pack)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from stepgraph.errors import require_type, unknown_name
from stepgraph.integrations.lengths import IGNORED
from stepgraph.kernels.attention.documents import attend_documents
from stepgraph.models.transformers import crosses_documents

Tensor = torch.Tensor

#: What our attention is called in ``model.config._attn_implementation``.
IMPLEMENTATION = "stepgraph_documents"
_LONGER = ("refuse", "cut", "drop")
#: Rows that are being filled at the same time: an example goes to the fullest one that has room for it.
_OPEN_ROWS = 32


class PackToBudget:
    """Packs examples into rows of ``tokens`` tokens; called with rows, it makes a batch of them (a collate function).

    Args:
        tokens: tokens per row.
        max_documents: at most this many documents per row; None: one per 32 tokens. The boundaries' tensor has this
        size. max_length: at most this many tokens per document; None: ``tokens``. A smaller one makes attention faster.
        longer: what happens to an example that exceeds ``max_length``: ``"refuse"`` it with an error, ``"cut"`` it, or
            ``"drop"`` it. ``cut`` and ``dropped`` count the examples.
        pad_token_id: the tokens after the last document of a row.

    An example is a mapping with ``input_ids`` and, if they differ, ``labels``, as lists or tensors of one dimension.
    ``attention_mask`` is left out; it must be all ones.

    Raises:
        ValueError: arguments that fit no row; an example with other fields, with padding, without tokens, or too long.
    """

    def __init__(
        self,
        tokens: int,
        *,
        max_documents: int | None = None,
        max_length: int | None = None,
        longer: Literal["refuse", "cut", "drop"] = "refuse",
        pad_token_id: int = 0,
    ):
        for name, number in (("tokens", tokens), ("max_length", max_length), ("max_documents", max_documents)):
            require_type(name, number or 0, int, "use a whole number")
        self.tokens, self.max_length = tokens, tokens if max_length is None else max_length
        self.max_documents = max(1, tokens // 32) if max_documents is None else max_documents
        if longer not in _LONGER:
            raise unknown_name("longer", longer, _LONGER)
        if not 1 <= self.max_length <= tokens or self.max_documents < 1:
            raise ValueError(
                f"tokens={tokens}, max_length={self.max_length}, max_documents={self.max_documents}: use numbers "
                "above 0, and a max_length of at most tokens"
            )
        self.longer, self.pad_token_id = longer, pad_token_id
        self.cut = self.dropped = 0

    def rows(self, examples: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Tensor]]:
        """Packed rows of a stream of examples, each of which is in one row; deterministic in their order."""
        fitted = (self._fitted(example) for example in examples)
        for row in self._filled((e for e in fitted if e is not None), lambda example: len(example[0])):
            yield self._row(row)

    def dataset(self, examples: Sequence[Mapping[str, Any]]) -> "PackedRows":
        """The packed rows of ``examples`` as a data set with a length, which samplers may shuffle. Reads all once."""
        return PackedRows(self, examples)

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The batch of ``rows``: ``input_ids``, ``labels`` and ``position_ids`` (rows, tokens); ``cu_seq_lens_q`` and
        ``cu_seq_lens_k``, the documents' boundaries in the flattened batch, int32; ``max_length_q``, ``max_length_k``.
        transformers passes these names to its attention functions."""
        if not rows or not all("position_ids" in row for row in rows):
            raise ValueError("a batch is made of packed rows: pass rows of pack.dataset(...) or pack.rows(...)")
        batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
        # The rest of a row is as many documents of padding as max_length asks for.
        slots = len(rows) * (self.max_documents + -(-self.tokens // self.max_length))
        offsets = torch.full((slots + 1,), batch["input_ids"].numel(), dtype=torch.int32)
        offsets[: len(starts)] = starts
        batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets)
        return batch | dict.fromkeys(("max_length_q", "max_length_k"), self.max_length)

    def _fitted(self, example: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """(tokens, labels) of an example, as long as allowed; None if it is dropped."""
        unknown = set(example) - {"input_ids", "labels", "attention_mask"}
        if unknown or "input_ids" not in example:
            raise ValueError(
                f"an example has the fields {', '.join(sorted(example))}; allowed are input_ids, labels and "
                "attention_mask: tokenize the text and leave other fields out"
            )
        tokens = torch.as_tensor(example["input_ids"], dtype=torch.int64)
        labels = torch.as_tensor(example.get("labels", tokens), dtype=torch.int64)
        mask = torch.as_tensor(example.get("attention_mask", 1))
        if tokens.ndim != 1 or not len(tokens) or labels.shape != tokens.shape or not mask.all():
            raise ValueError(
                f"an example has input_ids {tuple(tokens.shape)}, labels {tuple(labels.shape)} and "
                f"{int((mask == 0).sum())} padded tokens: use one dimension, one label per token and no padding"
            )
        if len(tokens) > self.max_length:
            if self.longer == "refuse":
                raise ValueError(
                    f"an example of {len(tokens)} tokens exceeds max_length={self.max_length}: use longer='cut' or "
                    "'drop', or a larger max_length"
                )
            self.cut, self.dropped = self.cut + (self.longer == "cut"), self.dropped + (self.longer == "drop")
            if self.longer == "drop":
                return None
            tokens, labels = tokens[: self.max_length], labels[: self.max_length]
        return tokens, labels

    def _filled(self, items: Iterable[Any], length: Any) -> Iterator[list[Any]]:
        """``items`` in lists whose lengths add up to at most a row's: each goes to the fullest list with room."""
        rows: list[tuple[int, list[Any]]] = []
        for item in items:
            size = length(item)
            fits = [
                i for i, (used, row) in enumerate(rows)
                if used + size <= self.tokens and len(row) < self.max_documents
            ]  # fmt: skip
            if fits:
                best = max(fits, key=lambda i: rows[i][0])
                rows[best] = rows[best][0] + size, [*rows[best][1], item]
            else:
                if len(rows) == _OPEN_ROWS:
                    fullest = max(range(len(rows)), key=lambda i: rows[i][0])
                    yield rows.pop(fullest)[1]
                rows.append((size, [item]))
        yield from (row for _, row in rows)

    def _row(self, documents: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        rest = self.tokens - sum(len(tokens) for tokens, _ in documents)
        fill = [min(self.max_length, rest - start) for start in range(0, rest, self.max_length)]
        lengths = [*(len(tokens) for tokens, _ in documents), *fill]
        ids = torch.cat([*(tokens for tokens, _ in documents), torch.full((rest,), self.pad_token_id)])
        labels = torch.cat([*(labels for _, labels in documents), torch.full((rest,), IGNORED)])
        positions = torch.cat([torch.arange(n) for n in lengths])
        # A model predicts a token from the one before it, which for the first one lies in another document.
        return {"input_ids": ids, "labels": labels.where(positions > 0, IGNORED), "position_ids": positions}


class PackedRows(torch.utils.data.Dataset):
    """The rows of `PackToBudget.dataset`: ``share`` of their tokens are documents', the rest is padding."""

    def __init__(self, pack: PackToBudget, examples: Sequence[Mapping[str, Any]]):
        self.pack, self.examples = pack, examples
        lengths = {}
        for number in range(len(examples)):
            if (found := pack._fitted(examples[number])) is not None:
                lengths[number] = len(found[0])
        if not lengths:
            raise ValueError(f"{len(examples)} examples leave nothing to pack: use some, or a larger max_length")
        self.packed = list(pack._filled(lengths, lengths.__getitem__))
        self.share = sum(lengths.values()) / (len(self.packed) * pack.tokens)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = [self.pack._fitted(self.examples[number]) for number in self.packed[index]]
        return self.pack._row([document for document in found if document is not None])


def attend_within_documents(model: nn.Module) -> None:
    """Let a model of transformers attend by `stepgraph.kernels.attention.documents` wherever a batch of `PackToBudget`
    comes, which skips everything outside a document; other batches use SDPA as before.

    The model then computes two short documents, packed and each alone, on its own device.

    Raises:
        ValueError: the model is not one of transformers', cannot switch its attention, or mixes packed documents
            (state-space layers, convolutions over the sequence).
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask

    require_type("model", model, nn.Module, "use a model of transformers")
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(f"{type(model).__name__} is not a model of transformers: call attend_documents in your model")
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    before = inner.config._attn_implementation
    inner.set_attn_implementation(IMPLEMENTATION)
    mixed = _mixed(inner)
    if inner.config._attn_implementation != IMPLEMENTATION or mixed:
        inner.set_attn_implementation(before)
        raise ValueError(
            f"{type(inner).__name__} cannot run packed documents, {mixed or 'its attention cannot be replaced'}: pad "
            "them with PadToLengths"
        )


def _mixed(model: nn.Module) -> str | None:
    """How a packed document differs from the same document alone; None if it does not."""
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.device
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(vocabulary, (n,), generator=generator) for n in (9, 7)]
    pack = PackToBudget(16, max_documents=2)
    (row,) = pack.rows([{"input_ids": document} for document in documents])
    batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in pack([row]).items() if k != "labels"}
    results: list[Tensor] = []

    def together() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            results.append(model(**batch, use_cache=False)[0])
            alone = [model(input_ids=d.unsqueeze(0).to(device), use_cache=False)[0] for d in documents]
        results.append(torch.cat(alone, dim=1))
        return results[0]

    if crosses_documents(model, together, 9):
        return "in which a document sees those before it"
    packed, alone = (result.detach().float() for result in results)
    apart = ((packed - alone).norm() / alone.norm()).item()
    exact = model.dtype == torch.float32 and device.type == "cpu"
    allowed = 1e-4 if exact else 3e-2  # bf16 rounds to 3 digits in every layer
    return f"whose results differ by {apart:.1%} from each document alone" if not apart <= allowed else None


def _attention(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, H_kv, T, D)
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:  # (B, T, H, D)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    offsets = more.get("cu_seq_lens_q")
    if offsets is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]
    if dropout or unknown or query.shape[2] != key.shape[2] or value.shape != key.shape:
        what = f"dropout={dropout}" if dropout else ", ".join(unknown) or "keys of another sequence or width"
        raise ValueError(
            f"{type(module).__name__} has attention with {what}, which packed documents do not support: set it to 0 or "
            "pad with PadToLengths"
        )
    causal = more.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    B, H, T, D = query.shape
    flat = [x.transpose(1, 2).reshape(B * T, -1, D) for x in (query, key, value)]
    out = attend_documents(
        *flat,
        offsets,
        int(more["max_length_q"]),
        causal=causal,
        window=sliding_window if causal else None,
        scale=scaling,
    )
    return out.view(B, T, H, D), None
