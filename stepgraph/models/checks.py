"""Checks that the model configurations share; errors say what was given, what is allowed, and one fix."""

import dataclasses

#: How far from what was given a divisor is looked for.
_NEAR = 10_000


def check_positive(config: object, *names: str) -> None:
    """Raise ``ValueError`` unless every named field of ``config`` is a number above zero, and a whole one where it is
    declared as such."""
    whole = {field.name for field in dataclasses.fields(config) if field.type in (int, "int")}
    for name in names:
        value = getattr(config, name)
        kind = int if name in whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} is not a {'whole ' if name in whole else ''}number; give one above 0")
        if not value > 0:
            raise ValueError(f"{name}={value} is not positive; give a value above 0")


def check_heads(dim: int, n_heads: int, n_kv_heads: int) -> None:
    """Raise ``ValueError`` unless ``n_heads`` divides ``dim`` and ``n_kv_heads`` divides ``n_heads``."""
    if dim % n_heads:
        raise ValueError(f"n_heads={n_heads} does not divide dim={dim}; try {_near_divisors('n_heads', dim, n_heads)}")
    if n_heads % n_kv_heads:
        fix = _near_divisors("n_kv_heads", n_heads, n_kv_heads)
        raise ValueError(f"n_kv_heads={n_kv_heads} does not divide n_heads={n_heads}; try {fix}")


def _near_divisors(name: str, total: int, given: int) -> str:
    """The nearest divisors of ``total`` on both sides of ``given``, as ``name=2 or name=4``; 1 where none is near."""
    start = min(given, total)
    below = next((d for d in range(start, max(0, start - _NEAR), -1) if total % d == 0), 1)
    above = [d for d in range(given, min(total, given + _NEAR) + 1) if total % d == 0][:1]
    return " or ".join(f"{name}={d}" for d in [below, *above])
