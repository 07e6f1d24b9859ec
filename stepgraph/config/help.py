"""``stepgraph COMMAND --help``, read from the source of the command's options: it does not wait for torch."""

import ast
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from stepgraph.config.option_names import Field, docstring_of, fields_of, model_fields, presets

#: The options of a run that `--help` shows, by group; the other commands leave out the passes' options only.
_MAIN = {
    "data": ("data", "tokenizer", "seq_len", "batch_size", "accumulate"),
    "training": ("steps", "lr", "precision", "val_every"),
    "speed and memory": ("memory", "mesh", "nproc"),
    "the run": ("out", "resume", "init_from_hf"),
}
#: The group of `StepOptions`.
_PASSES = "passes and kernels"
_COLUMN, _WIDTH = 30, 110


def show_help(usage: str, module: str, kind: str, description: str = "", every: bool = False) -> None:
    """Print the help of the command whose options the dataclass ``kind`` of ``module`` declares. ``every``: all of
    them, and those of the models."""
    groups: dict[str, list[Field]] = {}
    names, defaults = presets()
    for field in fields_of(module, kind):
        if field.name not in ("preset", "model"):
            default = defaults.get(field.name, field.default) if kind == "TrainConfig" else field.default
            groups.setdefault(field.group, []).append(field._replace(default=default))
    passes = groups.pop(_PASSES, [])
    hidden = bool(passes) and not every
    if every:
        groups |= {_PASSES: passes} if passes else {}
    elif kind == "TrainConfig":
        known = {field.name: field for field in itertools.chain(passes, *groups.values())}
        groups = {group: [known[name] for name in main] for group, main in _MAIN.items()}
    lines = [f"usage: {usage} [options]", "", *_wrapped(description or docstring_of(module, kind)), ""]
    if passes:
        lines += [*_wrapped(f"presets: {', '.join(names)}; the defaults below are the first one's"), ""]
    for group, fields in groups.items():
        lines += [f"{group}:", *_lines(fields, "--"), ""]
    for prefix, title, fields in model_fields() if passes and every else ():
        lines += [f"{title.rstrip('.')}:", *_lines(fields, prefix), ""]
    more = ["--help-all: every option, with those of passes, kernels and models"] if hidden else []
    print("\n".join([*lines, *more]).rstrip())


def _lines(fields: Iterable[Field], prefix: str) -> Iterator[str]:
    for field in fields:
        name = field.name.replace("_", "-")
        takes = f", {prefix}no-{name}" if field.annotation == "bool" else f" {_takes(field.annotation)}"
        default = _default(field.default)
        text = _wrapped(field.text + (f" (default: {default})" if default else ""), _COLUMN)
        first = f"  {prefix}{name}{takes} ".ljust(_COLUMN)
        if len(first) > _COLUMN:
            yield first.rstrip()
            first = " " * _COLUMN
        yield first + text[0].lstrip() if text else first.rstrip()
        yield from text[1:]


def _wrapped(text: str, indent: int = 0) -> list[str]:
    width = max(indent + 30, min(shutil.get_terminal_size().columns, _WIDTH))
    return textwrap.wrap(" ".join(text.split()), width, initial_indent=" " * indent, subsequent_indent=" " * indent)


def _takes(annotation: str) -> str:
    """What is written behind an option of this type: ``N``, ``{fp32,bf16}``, ``PATH``."""
    parts = [part for part in annotation.split(" | ") if part != "None"]
    return "|".join(_NAMES.get(part) or _choices(part) for part in parts)


_NAMES = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH", "tuple[str, ...]": "TEXT ..."}


def _choices(part: str) -> str:
    tree = ast.parse(part, mode="eval").body
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value is not ...]
    if part.startswith("Literal"):
        values = [str(node.value) for node in inside if node.value is not None]
        return "{" + ",".join(values) + "}" if len(values) > 1 else values[0]
    return "X X" if part == "tuple[float, float]" else "VALUE"


def _default(value: ast.expr | None) -> str:
    """A default as text; "" where there is none to show."""
    if isinstance(value, ast.Call) and value.args and ast.unparse(value.func) == "Path":
        value = value.args[0]
    try:
        plain = ast.literal_eval(value) if value is not None else None
    except ValueError:
        return ""
    return "" if plain in (None, (), "") else " ".join(map(str, plain)) if isinstance(plain, tuple) else str(plain)
