"""Launches that begin before the one ahead ends: all but those whose programs wait for each other, and what each reads
it reads after it has waited."""

import re

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from stepgraph import compat
from stepgraph.kernels.norm.triton import launch, workspace
from tests.kernels.norm.test_spills import both_directions, recorded_launches


def compiled(what, kinds):
    source = launch.source_of(what.kernel, kinds, (), what.constants, **what.options)
    return compat.triton_compiled(source, GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_launches_begin_early_and_wait_before_they_read():
    with recorded_launches() as seen:
        both_directions(1024, 1 << 20)
        both_directions(65536, 1 << 24)
    early = [(what, kinds) for what, kinds in seen.values() if what.options["dependent"]]
    assert {what.options["cooperative"] for what, _ in seen.values()} == {False, True}
    assert all(what.options["dependent"] is not what.options["cooperative"] for what, _ in seen.values())
    for what, kinds in early[:3]:  # forward, backward, and the sums over rows
        ptx = compiled(what, kinds)
        reads = [found.start() for found in re.finditer(r"ld\.(volatile\.)?global|cp\.async\.c[ag]", ptx)]
        assert ptx.index("griddepcontrol.wait") < min(*reads, ptx.index("st.global"))
        lets = ptx.find("griddepcontrol.launch_dependents")
        if what.kernel.fn.__name__ == "backward_kernel":
            assert lets > max(reads), "programs of the next launch would take the place of some of this one"
        else:
            assert lets == -1


def test_rows_are_read_during_the_launch_ahead_once_that_has_waited():
    """What wrote the rows has then ended; the sums that the launch ahead writes are read after its end."""
    with recorded_launches() as seen:
        both_directions(32768, 1 << 18)
    found = {what.kernel.fn.__name__: compiled(what, kinds) for what, kinds in seen.values()}
    ahead, behind = found["sums_kernel"], found["forward_kernel"]
    assert ahead.index("griddepcontrol.wait") < ahead.index("griddepcontrol.launch_dependents")
    assert behind.index("ld.global") < behind.index("griddepcontrol.wait") < behind.index("ld.volatile.global")


def test_captures_of_deleted_graphs_give_their_memory_back(monkeypatch):
    monkeypatch.setattr(workspace, "_wholes", {"gpu": "whole"})
    monkeypatch.setattr(workspace, "_chunks", {"gpu": "rest"})
    workspace.reuse()
    assert workspace._chunks == {"gpu": "whole"}
