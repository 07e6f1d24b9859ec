"""Options that the benchmarks share."""

from collections.abc import Collection

from stepgraph.errors import unknown_name


def provider_names(text: str, known: Collection[str]) -> list[str]:
    """The providers of ``--providers``, in order, each once. Raises ValueError for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise unknown_name("provider", name, known)
    return names
