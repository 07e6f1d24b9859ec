"""What the words of a command line say before torch is loaded: a wrong name, by the source of the command's dataclass,
and how many ranks to start."""

import ast
import itertools
import math
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stepgraph.errors import nearest, read_json, unknown_option

_ROOT = Path(__file__).parents[1]

#: Names of other trainers' options -> ours.
ELSEWHERE = {
    "--learning-rate": "--lr",
    "--lr-scheduler-type": "--schedule",
    "--epochs": "--steps N (a run has no epochs)",
    "--num-train-epochs": "--steps N (a run has no epochs)",
    "--max-steps": "--steps",
    "--num-steps": "--steps",
    "--output-dir": "--out",
    "--gradient-accumulation-steps": "--accumulate",
    "--grad-accum": "--accumulate",
    "--per-device-train-batch-size": "--batch-size",
    "--micro-batch-size": "--batch-size",
    "--max-seq-length": "--seq-len",
    "--block-size": "--seq-len",
    "--gradient-checkpointing": "--memory full",
    "--bf16": "--precision bf16, or bf16-autocast",
    "--fp16": "--precision bf16, or bf16-autocast (there is no fp16)",
    "--dtype": "--precision",
    "--wandb": "--log wandb",
    "--report-to": "--log",
    "--logging-steps": "--log-every",
    "--save-steps": "--checkpoint-every",
    "--eval-steps": "--val-every",
    "--save-total-limit": "--keep-checkpoints",
    "--resume-from-checkpoint": "--resume",
    "--model-name-or-path": "--init-from-hf",
    "--dataset": "--data",
    "--grad-clip": "--max-grad-norm",
    "--fsdp": "--mesh fsdp=N",
    "--tensor-parallel-size": "--mesh tp=N",
    "--compile": "--inductor",
}


class Field(NamedTuple):
    """A field of a dataclass of options, as its source declares it."""

    name: str
    annotation: str
    default: ast.expr | None
    text: str
    group: str


def check_options(words: list[str], command: str, module: str, kind: str, *more: str) -> None:
    """Raises ValueError, in one line, for the first option in the ``words`` behind ``command`` that is not in ``more``
    and that the dataclass ``kind`` of ``module`` has no field for. Options of a model, and what may be meant for one,
    are let pass: they depend on the preset."""
    allowed = ["--help", "--help-all", *more, *_names(module, kind)]
    for word in words:
        name = option_of(word)
        if name is None or name in allowed or name.startswith("--model."):
            continue
        if (ours := ELSEWHERE.get(name)) and ours.split()[0] in allowed:
            raise ValueError(f"unknown option {word.split('=', 1)[0]}: here it is {ours}")
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
    for field in fields_of(module, kind):
        if field.name not in ("preset", "model"):
            found += [f"--{field.name}"] + [f"--no-{field.name}"] * (field.annotation == "bool")
    return tuple(name.replace("_", "-") for name in found)


@cache
def _model_names() -> tuple[str, ...]:
    """``--model.name`` of every field of every model's configuration, whatever the preset."""
    fields = (field.name for _, _, group in model_fields() for field in group)
    return tuple(dict.fromkeys(f"--model.{name}".replace("_", "-") for name in fields))


def model_fields() -> list[tuple[str, str, list[Field]]]:
    """(prefix of the options, docstring's first line, fields) of every model's configuration."""
    found = []
    for file in sorted((_ROOT / "models").rglob("*.py")):
        source = file.read_text("utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.decorator_list:
                prefix = "--model.moe." if file.parent.name == "moe" else "--model."
                found.append((prefix, (ast.get_docstring(node) or "").split("\n")[0], _own_fields(node, source)))
    return found


def fields_of(module: str, kind: str) -> Iterator[Field]:
    """The fields of the class ``kind`` of ``module``, those of its bases in stepgraph first."""
    node, source, module = _class(module, kind)
    for parent in reversed(node.bases):
        yield from fields_of(module, ast.unparse(parent))
    yield from _own_fields(node, source)


def docstring_of(module: str, kind: str) -> str:
    """The docstring of the class ``kind`` of ``module``."""
    return ast.get_docstring(_class(module, kind)[0]) or ""


def presets() -> tuple[list[str], dict[str, ast.expr]]:
    """(the names of the presets, what the first, the default, sets)."""
    tree = ast.parse((_ROOT / "config" / "presets.py").read_text("utf-8"))
    table = next(n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "PRESETS")
    maker = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == ast.unparse(table.values[0]))
    made = next(node for node in ast.walk(maker) if isinstance(node, ast.Call))
    return [key.value for key in table.keys], {word.arg: word.value for word in made.keywords}


def _class(module: str, kind: str) -> tuple[ast.ClassDef, str, str]:
    """(the class, its source file's text, its module), also where ``module`` imports it."""
    base = _ROOT.joinpath(*module.split(".")[1:])
    source = (base / "__init__.py" if base.is_dir() else base.with_suffix(".py")).read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            return node, source, module
        if isinstance(node, ast.ImportFrom) and any(alias.name == kind for alias in node.names):
            return _class(node.module, kind)
    raise LookupError(f"no class {kind} in {module}")


def _own_fields(node: ast.ClassDef, source: str) -> list[Field]:
    """A field's text is the docstring below it, or the comment behind it; its group the comment ``# -- GROUP ---``
    above it."""
    lines, found, group, read = source.splitlines(), [], "options", node.lineno
    for item, below in itertools.zip_longest(node.body, node.body[1:]):
        if not isinstance(item, ast.AnnAssign):
            continue
        headings = (re.match(r" *# -- (.*?) -+$", line) for line in lines[read : item.lineno])
        group, read = next((m[1] for m in headings if m), group), item.lineno
        text = lines[item.end_lineno - 1].partition("  # ")[2]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = str(below.value.value)
        found.append(Field(item.target.id, ast.unparse(item.annotation), item.value, text, group))
    return found
