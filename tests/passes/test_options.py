"""Options of a step that could do nothing are refused."""

import pytest

from stepgraph.passes import StepOptions
from stepgraph.passes.options import check_step


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("norm", "kernel"), ("attention", "flash2"), ("epilogues", "auto"), ("loss_chunks", 2)),
        *(("inductor", "regional"), ("tiles", 2), ("fp8", "rowwise"), ("async_tp", True), ("copy_engines", True)),
    ],
)
def test_what_exact_passes_leave_alone(name, value):
    check_step(StepOptions(**{name: value}))
    with pytest.raises(ValueError, match=f"^{name}.* passes=exact"):
        check_step(StepOptions("exact", **{name: value}))
