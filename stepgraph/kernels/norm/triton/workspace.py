"""Zeroed memory for counters and shares, which kernels leave zeroed.

Two kernels that run at the same time must not share it, so each stream has its own, and so has each call captured into
a CUDA graph (whose replays follow each other). Captured calls keep their part of a chunk allocated before the capture;
if that is used up, or was never made, they get fresh memory and the zeroing of it is captured too.
"""

import torch

_CHUNK_WORDS = 1 << 20

_streams: dict[tuple[torch.device, int | None], torch.Tensor] = {}
_wholes: dict[torch.device, torch.Tensor] = {}
_chunks: dict[torch.device, torch.Tensor] = {}


def reuse() -> None:
    """Captured calls get the memory of earlier ones again: for a program that has deleted its graphs."""
    _chunks.update(_wholes)


def zeros(device: torch.device, stream: int | None, words: int) -> torch.Tensor:
    """At least ``words`` zeros, int64, for one kernel launched on ``stream``, which must leave them zero."""
    if device.type == "cpu":  # the interpreter
        return torch.zeros(words, dtype=torch.int64)
    if torch.cuda.is_current_stream_capturing():
        chunk = _chunks.get(device)
        if chunk is None or chunk.numel() < words:
            return torch.zeros(words, dtype=torch.int64, device=device)
        # 32 words are 256 bytes: the counters of two calls never share a cache line.
        _chunks[device] = chunk[-(-words // 32) * 32 :]
        return chunk[:words]
    mine = _streams.get((device, stream))
    if mine is None or mine.numel() < words:
        # A kernel may still use the memory dropped here: the allocator hands it out again on this stream only.
        mine = _streams[device, stream] = torch.zeros(max(words, 4096), dtype=torch.int64, device=device)
        if device not in _chunks:
            _wholes[device] = _chunks[device] = torch.zeros(_CHUNK_WORDS, dtype=torch.int64, device=device)
            # Captures on other streams will use it. An event's wait is no wait of the caller's for torch's check.
            torch.cuda.current_stream(device).record_event().synchronize()
    return mine
