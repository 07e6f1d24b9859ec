"""Inductor's order of reads and writes of one buffer: which reads let a kernel write it too."""

from types import SimpleNamespace

import pytest
import sympy
from torch._inductor.dependencies import MemoryDep, StarDep, WeakDep

from stepgraph.compat.writes import _fusable

PLACE = sympy.Symbol("i")


def at(name, index):
    return MemoryDep(name, index, (PLACE,), (sympy.Integer(8),))


@pytest.mark.parametrize(
    "read, fuses",
    [
        (at("second", PLACE), True),
        (at("second", 7 - PLACE), False),
        (at("other", 7 - PLACE), True),
        (StarDep("second"), False),
        (WeakDep("second", "third"), False),
    ],
)
def test_a_kernel_writes_what_it_reads_only_at_the_same_elements(read, fuses):
    scheduler = SimpleNamespace(mutation_real_name={"second": "first", "third": "first"})
    reader, writer = (
        SimpleNamespace(read_writes=SimpleNamespace(reads=[read], writes=[at(name, PLACE)]))
        for name in ("out", "third")
    )
    found = _fusable(scheduler, lambda *_: True, SimpleNamespace(mutating_buf="third"), reader, writer)
    assert found == fuses
