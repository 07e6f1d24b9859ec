"""The configuration of a call: the first of the `rules` that fits."""

import functools

from stepgraph.kernels.norm.triton.config.limits import Config, Hardware, Problem, fits, register_estimate, runs
from stepgraph.kernels.norm.triton.config.rules import preferences


@functools.lru_cache(maxsize=4096)
def _select(problem: Problem, hw: Hardware) -> Config:
    tried = list(preferences(problem, hw))
    for config in tried:
        if fits(problem, config, hw):
            return config
    # Nothing fits, on a small GPU or for long rows with per-head weights: what spills least is still correct.
    possible = [config for config in tried if runs(problem, config, hw) and config.pieces(problem.span) <= 64]
    if not possible and problem.heads > 1:
        raise ValueError(
            f"rows of {problem.N} with a weight for each of {problem.heads} heads do not fit a program, "
            "which holds some 12,000 elements; use one weight for all heads"
        )
    if not possible:
        raise ValueError(
            f"rows of {problem.N} are longer than {hw.processors} processors can share; split the last dimension"
        )
    return min(possible, key=lambda config: (register_estimate(problem, config), config.rows))


def select(problem: Problem, hw: Hardware) -> Config:
    """The configuration of a call: fixed by its shape and dtypes, so that results repeat bit for bit.

    Raises ValueError for rows too long for all processors together, or, with per-head weights, for one program.
    """
    return _select(problem._replace(M=_rounded(problem.M)), hw)


def _rounded(rows: int) -> int:
    """Numbers of rows, rounded up to three bits: serving batches of any size find their configuration in the cache."""
    shift = max(0, rows.bit_length() - 3)
    return -(-rows >> shift) << shift
