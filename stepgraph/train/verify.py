"""``stepgraph train --verify``: the captured step compared with eager, before the first step."""

import itertools
from collections.abc import Callable, Sequence

import torch

import stepgraph
from stepgraph.config.train import TrainConfig
from stepgraph.parallel.ranks import Ranks


class NotExactError(RuntimeError):
    """A step of exact passes is not bitwise equal to eager."""


def verify_step(
    step: stepgraph.CapturedStep,
    batches: Sequence[dict[str, torch.Tensor]],
    config: TrainConfig,
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Verify ``step`` on microbatches of ``batches``, and print what it says.

    Raises `NotExactError` if the passes are exact and any rank's result is not eager's, though eager repeats itself.
    """
    parts = list(itertools.islice(itertools.cycle(batches), config.accumulate))
    # The usual number of targets of conversations is the same in all.
    joined = lambda found: (torch.cat(found) if found[0].ndim else found[0]).to(device)  # noqa: E731
    batch = {name: joined([part[name] for part in parts]) for name in parts[0]}
    report = step.verify(batch)
    reports = Ranks().gather(lambda: report)
    rank, worst = max(enumerate(reports), key=lambda one: (not one[1].bitwise, not one[1].close))
    say(str(worst) + (f" (rank {rank})" if len(reports) > 1 and not worst.bitwise else ""))
    if config.passes == "exact" and not worst.bitwise and worst.repeats:
        raise NotExactError(
            f"the exact step is not bitwise equal to eager: {worst.largest.kind} {worst.largest}; "
            "train without --verify, and report it with the lines above"
        )
    if not all(r.close for r in reports):
        say(
            f"warning: loss or gradient norm differ from eager by more than a relative {worst.tolerance:.1g}, the most "
            "that rounding in the step's dtypes explains; compare with --passes exact"
        )
