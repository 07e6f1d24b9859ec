"""The user's cache folder, shared by earlier and later runs."""

import os
from pathlib import Path

#: Names a folder for saved steps, or says "off".
VARIABLE = "STEPGRAPH_CACHE"


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/stepgraph``, in ``~/.cache`` where that is not set. Raises ``ValueError`` for a user who has no
    home, as in a container that runs as a number."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else _home("~/.cache")) / "stepgraph"


def named_cache(otherwise: Path | str = ".") -> Path | None:
    """The folder that ``STEPGRAPH_CACHE`` names, else ``otherwise`` in the user's cache; None where it says ``off``."""
    named = os.environ.get(VARIABLE)
    if named == "off":
        return None
    return _home(named) if named else user_cache() / otherwise


def _home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{path}: this user has no home folder; set HOME, or XDG_CACHE_HOME to a folder for caches"
        ) from None
