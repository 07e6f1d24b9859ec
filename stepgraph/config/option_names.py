"""What the words of a command line say before torch is loaded: a wrong name, by the source of the command's dataclass,
and how many ranks to start."""

import ast
import math
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from stepgraph.errors import nearest, read_json, unknown_option

_ROOT = Path(__file__).parents[1]


def check_options(words: list[str], command: str, module: str, kind: str, *more: str) -> None:
    """Raises ValueError, in one line, for the first option in the ``words`` behind ``command`` that is not in ``more``
    and that the dataclass ``kind`` of ``module`` has no field for. Options of a model, and what may be meant for one,
    are let pass: they depend on the preset."""
    allowed = ["--help", *more, *_names(module, kind)]
    for word in words:
        name = option_of(word)
        if name is None or name in allowed or name.startswith("--model."):
            continue
        near = nearest(name, [*allowed, *_model_names()])
        if near is None or not near.startswith("--model."):
            raise unknown_option(word.split("=", 1)[0], allowed, command)


def option_of(word: str) -> str | None:
    """``--batch-size`` for ``--batch_size=8``; None for what is no option. A dash and a digit start a number."""
    name = word.split("=", 1)[0]
    return name.replace("_", "-") if re.match(r"--?[a-zA-Z]", name) and name != "-h" else None


def value_of(option: str, options: list[str]) -> str | None:
    """The last value given to ``option``, as ``--option VALUE`` or ``--option=VALUE``, with dashes or underscores."""
    value = None
    for position, word in enumerate(options):
        if option_of(word) != option:
            continue
        if "=" in word:
            value = word.partition("=")[2]
        elif position + 1 < len(options) and option_of(options[position + 1]) is None:
            value = options[position + 1]
    return value


def run_of(folder: Path) -> Path:
    """The run that ``folder`` is, or whose checkpoint ``RUN/checkpoints/step-N`` it is."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def ranks_asked_for(words: list[str]) -> int | None:
    """The N of ``--nproc N`` in the ``words`` behind ``stepgraph train``, or of the run that they resume, if so many
    ranks may be started as they are, to check the options themselves.

    None for a process that is a rank, for help, and where the options have to be checked first: without a ``--mesh`` of
    so many ranks, with ``--config``, and with ``--max-restarts``, which would start ranks again that refuse them.
    """
    given = {option_of(word) for word in words}
    if "RANK" in os.environ or "-h" in words or given & {"--help", "--config"}:
        return None
    options: dict[str, object] = {}
    if resumed := value_of("--resume", words):
        try:
            options = dict(read_json(run_of(Path(resumed)) / "config.json"))
        except (OSError, ValueError, TypeError):
            return None
    nproc, mesh, restarts = (
        value_of(f"--{name}", words) if f"--{name}" in given else options.get(name.replace("-", "_"))
        for name in ("nproc", "mesh", "max-restarts")
    )
    if restarts not in (None, 0, "0") or not str(nproc).isdecimal():
        return None
    sizes = dict(re.findall(r"(\w+)=(\d+(?:x\d+)?)", str(mesh)))
    if sizes.pop("ep", None) and not sizes.keys() & {"fsdp", "ddp", "hsdp"}:
        return None  # how many ranks those are is computed
    ranks = math.prod(int(size) for text in sizes.values() for size in text.split("x"))
    return ranks if ranks == int(str(nproc)) > 1 else None


@cache
def _names(module: str, kind: str) -> tuple[str, ...]:
    """``--name`` of every field, that of its bases too, and ``--no-name`` of a flag."""
    found = []
    for name, annotation in _fields(module, kind):
        if name not in ("preset", "model"):
            found += [f"--{name}", f"--no-{name}"] if annotation == "bool" else [f"--{name}"]
    return tuple(name.replace("_", "-") for name in found)


@cache
def _model_names() -> tuple[str, ...]:
    """``--model.name`` of every field of every model's configuration, whatever the preset."""
    trees = (ast.parse(file.read_text("utf-8")) for file in sorted((_ROOT / "models").rglob("*.py")))
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = (name for node in classes if node.name.endswith("Config") for name, _ in _own_fields(node))
    return tuple(dict.fromkeys(f"--model.{name}".replace("_", "-") for name in fields))


def _fields(module: str, kind: str) -> Iterator[tuple[str, str]]:
    """(name, annotation) of the fields of the class, those of its bases in stepgraph first."""
    base = _ROOT.joinpath(*module.split(".")[1:])
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    tree = ast.parse(file.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for parent in node.bases:
                yield from _fields(module, ast.unparse(parent))
            yield from _own_fields(node)
        elif isinstance(node, ast.ImportFrom) and any(alias.name == kind for alias in node.names):
            yield from _fields(node.module, kind)


def _own_fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    return [(item.target.id, ast.unparse(item.annotation)) for item in node.body if isinstance(item, ast.AnnAssign)]
