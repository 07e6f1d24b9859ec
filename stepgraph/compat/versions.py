"""Which torch this is, and which ones stepgraph knows. Imported before anything private of torch."""

import re
import warnings

import torch

#: The first and the last minor version on which the test suite was run; see `benchmarks/versions.json`.
OLDEST, NEWEST = (2, 11), (2, 15)


def minor_version(version: str) -> tuple[int, int]:
    """(2, 15) for ``"2.15.0+cu130"``, ``"2.15.0a0+git12ab"`` or ``"2.15"``. Raises ``ValueError`` for other text."""
    match = re.match(r"(\d+)\.(\d+)(?![^.+a-z])", version)
    if match is None:
        raise ValueError(f"{version!r} is not a version of torch: it has to begin with two numbers, like 2.15.0")
    return int(match[1]), int(match[2])


def check_version(version: str) -> None:
    """Raises ``ImportError`` for a torch older than `OLDEST`; warns once, in one line, of one newer than `NEWEST`."""
    found = minor_version(version)
    if found < OLDEST:
        raise ImportError(
            f"stepgraph needs torch {_text(OLDEST)} or newer, and torch {version} is installed: "
            f"pip install 'torch>={_text(OLDEST)}'"
        )
    if found > NEWEST:
        warnings.warn(
            f"stepgraph is not tested with torch {version}, only with {_text(OLDEST)} to {_text(NEWEST)}: compare a "
            f"step with eager before you trust it, or pip install 'torch<{NEWEST[0]}.{NEWEST[1] + 1}'",
            stacklevel=2,
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


#: The torch that is installed, as (major, minor).
TORCH = minor_version(torch.__version__)
check_version(torch.__version__)
