"""What is asked of process groups and NCCL."""

import os

import pytest
import torch

from stepgraph import compat


@pytest.mark.parametrize(
    ("expandable", "chosen", "expected"),
    [(True, None, "0"), (True, "1", "1"), (False, None, None)],
    ids=["expandable", "chosen", "plain"],
)
def test_nccl_records_without_registering_buffers_in_expandable_segments(expandable, chosen, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    segments = [{"is_expandable": False}, {"is_expandable": expandable}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", chosen or "")
    if chosen is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    compat.record_nccl_unregistered()
    assert os.environ.get("NCCL_GRAPH_REGISTER") == expected
