"""Batches for the architectures of `transformers`: the keyword arguments of forward, labels among them."""

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 61
SEQUENCES, LENGTH = 4, 12


def ids() -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (SEQUENCES, LENGTH))


def causal() -> dict[str, Any]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked() -> dict[str, Any]:
    """Padded sequences; three tokens of four carry no label."""
    tokens = ids()
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9], [5], [LENGTH]])).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": torch.where(torch.rand(tokens.shape) < 0.25, tokens, -100),
    }


def classes() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": torch.randint(2, (SEQUENCES,))}


def token_classes() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": torch.randint(2, (SEQUENCES, LENGTH))}


def spans() -> dict[str, Any]:
    start = torch.randint(LENGTH, (SEQUENCES,))
    return {"input_ids": ids(), "start_positions": start, "end_positions": start.clone()}


def choices() -> dict[str, Any]:
    tokens = torch.stack([ids(), ids()], 1)
    return {"input_ids": tokens, "labels": torch.randint(2, (SEQUENCES,))}


def translation() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": ids()}


def images(size: int = 16) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(SEQUENCES, 3, size, size), "labels": torch.randint(2, (SEQUENCES,))}


def segments() -> dict[str, Any]:
    return {"pixel_values": torch.randn(SEQUENCES, 3, 32, 32), "labels": torch.randint(2, (SEQUENCES, 32, 32))}


def pairs() -> dict[str, Any]:
    return {"input_ids": ids(), "pixel_values": torch.randn(SEQUENCES, 3, 16, 16), "return_loss": True}


def waves(samples: int = 400) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_values": torch.randn(SEQUENCES, samples), "labels": torch.randint(2, (SEQUENCES,))}


def spectrograms() -> dict[str, Any]:
    return {"input_features": torch.randn(SEQUENCES, 8, 40), "labels": ids()}


def pictures_in_text(image_token: int = 3, tokens: int = 16) -> Callable[[], dict[str, Any]]:
    """Each sequence begins with the places of one image's features."""

    def make() -> dict[str, Any]:
        text = torch.cat([torch.full((SEQUENCES, tokens), image_token), ids()], 1)
        mask = torch.arange(tokens + LENGTH) < tokens + torch.tensor([[LENGTH], [9], [5], [LENGTH]])
        return {
            "input_ids": text,
            "pixel_values": torch.randn(SEQUENCES, 3, 16, 16),
            "attention_mask": mask.long(),
            "labels": text.where(mask & (text != image_token), -100),
        }

    return make


def pictures_and_types() -> dict[str, Any]:
    batch = pictures_in_text()()
    return batch | {"token_type_ids": (batch["input_ids"] != 3).long()}


def series() -> dict[str, Any]:
    return {"past_values": torch.randn(SEQUENCES, 32, 2), "future_values": torch.randn(SEQUENCES, 8, 2)}
