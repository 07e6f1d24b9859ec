"""The orders in which torch's pipeline schedules run forward and backward of stages on their ranks."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


def pipeline_order(
    schedule: str, ranks: int, chunks: int, microbatches: int, *, single: bool
) -> list[list[tuple[str, int, int]]]:
    """For each rank, in order, (kind, stage, microbatch) of what it runs in torch's ``schedule``, the name of a class
    of ``torch.distributed.pipelining``. Kind: ``forward``, ``backward``, ``backward_input`` or ``backward_weight``.

    ``chunks``: stages of a rank. ``single``: whether each rank has one stage. Where two are to overlap, the
    forward comes first. Raises ``ValueError`` where torch does.
    """
    from torch.distributed.pipelining import schedules  # imports much of torch

    kind = getattr(schedules, schedule)

    # What their constructors read of stages: torch's own hold a module each.
    def stage(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=index == ranks * chunks - 1,
            submod=None,
            has_backward=True,
        )

    stages = [stage(i) for i in range(chunks)]
    made = kind(stages[0] if single else stages, microbatches)
    return [_numbered([step for action in made.pipeline_order[r] for step in _steps(action)]) for r in range(ranks)]


def _numbered(steps: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Each stage runs the forwards of its microbatches in order. Counted here: torch (2.11 to 2.15) counts the forwards
    of 1F1B's last rank from one."""
    seen: Counter[int] = Counter()
    numbered = []
    for kind, stage, microbatch in steps:
        if kind == "forward":
            microbatch, seen[stage] = seen[stage], seen[stage] + 1
        numbered.append((kind, stage, microbatch))
    return numbered


def _steps(action: Any) -> list[tuple[str, int, int]]:
    if action is None:
        return []
    if (parts := getattr(action, "sub_actions", None)) is not None:
        return [step for part in parts for step in _steps(part)]
    name = _KINDS.get(action.computation_type.name)
    return [] if name is None else [(name, action.stage_index, action.microbatch_index)]
