"""Error messages for people: what was given, what is allowed, one fix."""

import difflib
from collections.abc import Iterable


class CaptureError(ValueError):
    """The training step cannot be captured; the message names the module path and the source line."""


def unknown_name(kind: str, given: str, allowed: Iterable[str]) -> ValueError:
    """A ``ValueError`` that refuses ``given`` and offers the nearest allowed name (or all of them)."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.4)
    fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(allowed)}"
    return ValueError(f"unknown {kind} {given!r}: {fix}")
