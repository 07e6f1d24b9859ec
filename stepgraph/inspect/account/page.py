"""The page: one HTML file with an account and the code that draws it. It loads nothing."""

import html
import json
import re
from pathlib import Path
from typing import Any

from stepgraph.errors import write_text
from stepgraph.inspect.account.account import FORMAT

#: The name of the page in a run folder.
PAGE = "page.html"
_PARTS = Path(__file__).parent / "page"
#: In the order of loading: each uses the ones before it.
_SCRIPTS = ["data", "dom", "summary", "timeline", "pipeline", "memory", "budget", "tables", "card", "main"]
_BLOCK = re.compile(r'<script type="application/json" id="account">(.*?)</script>', re.DOTALL)


def page_of(account: dict[str, Any]) -> str:
    """The page of ``account``."""
    title = " ".join(filter(None, [account["head"]["title"], account["head"]["mesh"], "stepgraph"]))
    return _part("page.html").format(
        title=html.escape(title),
        style=_part("page.css"),
        account=_json(account),
        script="\n".join(_part(f"{name}.js") for name in _SCRIPTS),
    )


def write_page(path: Path, account: dict[str, Any]) -> None:
    """Write the page to ``path`` in one step."""
    write_text(path, page_of(account))


def read_page(path: Path | str) -> dict[str, Any]:
    """The account that the page ``path`` shows. Raises ``ValueError`` for any other file or version."""
    found = _BLOCK.search(Path(path).read_text(encoding="utf-8", errors="replace"))
    if found is None:
        raise ValueError(f"{path} is not a page of stepgraph inspect: use a run folder, a preset or such a page")
    account = json.loads(found[1])
    if account.get("format") != FORMAT:
        raise ValueError(
            f"{path} was written by another version of stepgraph (form {account.get('format')}, here {FORMAT}): write "
            "it again"
        )
    return account


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    # "</script>" in a string would end the block.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
