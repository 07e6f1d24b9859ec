"""Command lines from dataclasses, by argparse. Each usage error is one line with one fix. Does not import torch.

Each field of a dataclass is an option, with dashes for underscores. A field of a nested dataclass has the outer name as
a prefix: ``--model.n-layers``. The field's type gives the allowed values, its docstring the help text.
"""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import itertools
import math
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVarTuple

from stepgraph.errors import nearest, read_json, unknown_option
from stepgraph.options import StepOptions, allowed, kinds, names

Records = TypeVarTuple("Records")

#: Our options, and what other trainers call them.
_NAMES = {
    "--lr": ("--learning-rate",),
    "--schedule": ("--lr-scheduler-type",),
    "--epochs": ("--num-epochs", "--num-train-epochs"),
    "--steps": ("--max-steps", "--num-steps"),
    "--out": ("--output-dir",),
    "--accumulate": ("--gradient-accumulation-steps", "--grad-accum"),
    "--batch-size": ("--per-device-train-batch-size", "--micro-batch-size", "--train-batch-size"),
    "--seq-len": ("--max-seq-length", "--max-length", "--context-length", "--block-size"),
    "--memory full": ("--gradient-checkpointing", "--activation-checkpointing"),
    "--precision bf16, or bf16-autocast": ("--bf16",),
    "--precision bf16, or bf16-autocast (there is no fp16)": ("--fp16",),
    "--precision": ("--dtype", "--mixed-precision"),
    "--attention": ("--flash-attention",),
    "--log wandb": ("--wandb",),
    "--log": ("--report-to",),
    "--log-every": ("--logging-steps",),
    "--checkpoint-every": ("--save-steps",),
    "--val-every": ("--eval-steps",),
    "--keep-checkpoints": ("--save-total-limit",),
    "--resume": ("--resume-from-checkpoint",),
    "--init-from-hf FOLDER, or a preset as the first word": ("--model", "--model-name-or-path"),
    "--data": ("--dataset", "--dataset-name"),
    "--max-grad-norm": ("--grad-clip", "--clip-grad-norm"),
    "--warmup-steps N": ("--warmup-ratio",),
    "--mesh fsdp=N": ("--fsdp", "--dp", "--deepspeed"),
    "--mesh tp=N": ("--tp", "--tensor-parallel-size"),
    "--mesh pp=N": ("--pp",),
    "--mesh ep=N": ("--ep",),
    "--mesh cp=N": ("--cp",),
    "--nproc": ("--gpus", "--num-gpus", "--nproc-per-node"),
    "--inductor": ("--compile",),
}
#: Names of other trainers' options -> ours.
ELSEWHERE = {theirs: ours for ours, names in _NAMES.items() for theirs in names}


class Option(NamedTuple):
    """A field as an option. ``path``: the names that lead to it, as ``("model", "n_layers")``. ``owner``: the dataclass
    that declares it."""

    path: tuple[str, ...]
    kind: Any
    value: Any
    owner: type

    @property
    def flag(self) -> str:
        return "--" + ".".join(self.path).replace("_", "-")


def options_of(record: object, taken: Iterable[str] | None = None, path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Every option of a dataclass and of the dataclasses in it, of names in ``taken`` if given; no preset's name."""
    every = dataclasses.fields(record)  # pyrefly: ignore[bad-argument-type]
    skipped = {"preset", *(field.name for field in every if taken is not None and field.name not in taken)}
    for field in every:
        value, hint = getattr(record, field.name), field.type
        if dataclasses.is_dataclass(value):
            yield from options_of(value, None, (*path, field.name))
        # A group that the default leaves out (None) has no options.
        elif field.name not in skipped and not any(map(dataclasses.is_dataclass, kinds(hint))):
            owners = (c for c in type(record).__mro__ if field.name in vars(c).get("__annotations__", ()))
            yield Option((*path, field.name), hint, value, next(owners))


def check_names(
    words: list[str], command: str, options: Iterable[Option], more: Iterable[str] = (), models: bool = True
) -> None:
    """Raises ValueError, in one line, for the first option in ``words`` that is neither in ``options`` nor in ``more``.
    Without ``models``, what may be meant for an option of a model is accepted."""
    known = ["--help", "--help-all", *more, *_flags(options)]
    for word in words:
        name = option_of(word)
        if name is None or name in known:
            continue
        if (ours := ELSEWHERE.get(name)) and ours.split()[0] in known:
            raise ValueError(f"unknown option {word.split('=', 1)[0]}: here it is {ours}")
        if models or (nearest(name, known) and not name.startswith("--model.")):
            raise unknown_option(word.split("=", 1)[0], known, command)


def _flags(options: Iterable[Option]) -> Iterator[str]:
    for option in options:
        yield option.flag
        if option.kind is bool:
            yield f"--no-{option.flag.removeprefix('--')}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse(
    words: list[str], usage: str, *records: *Records, parts: tuple[type | str, ...] = (), description: str = ""
) -> tuple[*Records]:
    """``records``, dataclasses, with the fields that ``words`` set; ``--help`` prints and exits.

    ``parts``: what is taken of the first, if not all: the options of these dataclasses that it is made of, single ones
    by name, and the options of its model. ``usage``: the command with its arguments, such as ``stepgraph train
    [PRESET]``. Raises ValueError, in one line, for an unknown option (with the nearest one) and for a bad value.
    """
    taken = {name for part in parts for name in ([part] if isinstance(part, str) else names(part))}
    found = [list(options_of(record, taken if parts and not i else None)) for i, record in enumerate(records)]
    every = [option for options in found for option in options]
    if asked := {"-h", "--help", "--help-all"} & set(words):
        show_help(usage, description, every, every="--help-all" in asked)
        sys.exit(0)
    command = " ".join(word for word in usage.split() if word.islower())
    check_names(words, command, every)
    values, rest = read_values(words, usage, every)
    if rest:
        raise ValueError(f"unexpected {rest[0]!r}: write {usage} [--option VALUE ...]")
    return tuple(  # pyrefly: ignore[bad-return]
        _with(record, {o.path: values[o.flag] for o in options if o.flag in values})
        for record, options in zip(records, found, strict=True)
    )


def read_values(words: list[str], usage: str, options: Iterable[Option]) -> tuple[dict[str, Any], list[str]]:
    """(the values of ``options`` in ``words``, by flag; the words that are none of them). Raises ValueError, in one
    line, for a bad value."""
    parser = _Parser(usage=usage, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in options:
        parser.add_argument(option.flag, dest=option.flag, **_reads(option))
    plain = [re.sub(r"^--[^=]*", lambda m: m[0].replace("_", "-"), word) if option_of(word) else word for word in words]
    values, rest = parser.parse_known_args(plain)
    typed = dict(zip(plain, words, strict=True))
    return vars(values), [typed.get(word, word) for word in rest]


def _with(record: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """``record`` with the ``values`` at their paths."""
    changed: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in values):
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        try:
            changed[name] = inner[()] if () in inner else _with(getattr(record, name), inner)
        except ValueError as error:
            raise ValueError(f"bad value for {name}: {error}") from None
    changed |= {name: tuple(value) for name, value in changed.items() if isinstance(value, list)}
    return dataclasses.replace(record, **changed)


def _reads(option: Option) -> dict[str, Any]:
    """How argparse reads an option."""
    if option.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    items = typing.get_args(option.kind) if typing.get_origin(option.kind) is tuple else ()
    form = {"action": "append"} if ... in items else {"nargs": len(items)} if items else {}
    return form | {"type": partial(_read, items[0] if items else option.kind, option.value)}


#: What a type is called, and what is written for its values in help.
_READERS = {int: ("a whole number", "N"), float: ("a number", "X"), str: ("text", "TEXT"), Path: ("a path", "PATH")}


def _read(hint: Any, default: object, word: str) -> Any:
    """``word`` as the type ``hint``. An empty one is a shell's variable that is not set, and an empty path would be the
    folder that this runs in: it is taken only where the default is empty too."""
    if word == "" and default != "":
        raise argparse.ArgumentTypeError("its value is empty: set it, or leave it out")
    fixed = {str(value): value for kind in kinds(hint) for value in allowed(kind)}
    for written in (word, word.lower()):
        if written in fixed:
            return fixed[written]
    for reads in (kind for kind in kinds(hint) if kind in _READERS):
        with contextlib.suppress(ValueError):
            return reads(word)
    takes = [_READERS[kind][0] for kind in kinds(hint) if kind in _READERS] + list(fixed)
    raise argparse.ArgumentTypeError(f"{word!r} is not {takes[0] if len(takes) == 1 else 'one of ' + ', '.join(takes)}")


#: The options of a run that `--help` shows, by group; the other commands leave out only the options of passes and
#: models.
_MAIN = {
    "data": ("data", "tokenizer", "seq_len", "batch_size", "accumulate"),
    "training": ("steps", "epochs", "lr", "precision", "val_every"),
    "speed and memory": ("memory", "mesh", "nproc"),
    "the run": ("out", "resume", "init_from_hf"),
}


def show_help(usage: str, description: str, options: Iterable[Option], every: bool = False) -> None:
    """Print the help of a command with ``options``. ``every``: all of them, with the options of passes and models."""
    known, groups = {option.path[-1]: option for option in options}, {}
    if "resume" in known and not every:
        groups = {title: [known[name] for name in main] for title, main in _MAIN.items()}
    else:
        for option in options:
            if every or not (option.owner is StepOptions or option.path[1:]):
                title = (option.owner.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".")
                groups.setdefault("options" if description.startswith(title) else title, []).append(option)
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width)
    more = "--help-all: every option, including passes, kernels and models" if "passes" in known and not every else ""
    text = textwrap.fill(" ".join(description.split()), width, break_on_hyphens=False)
    parser = _Parser(usage=f"{usage} [options]", description=text, epilog=more, add_help=False, formatter_class=form)
    for title, members in groups.items():
        group = parser.add_argument_group(title)
        for option in members:
            shown = {} if option.kind is bool else {"metavar": _metavar(option.kind)}
            default = " ".join(map(str, option.value)) if isinstance(option.value, tuple) else str(option.value)
            text = _texts(option.owner)[option.path[-1]] + (f" (default: {default})" * (default not in ("None", "")))
            group.add_argument(option.flag, **_reads(option), **shown, help=text.replace("%", "%%"))
    print(parser.format_help(), end="")  # its `print_help` hides that it cannot be written


def _metavar(hint: Any) -> str | tuple[str, ...]:
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        return "TEXT" if ... in items else tuple(str(_metavar(item)) for item in items)
    several = [kind for kind in kinds(hint) if kind is not types.NoneType]
    forms = [_READERS[kind][1] if kind in _READERS else ",".join(map(str, allowed(kind))) for kind in several]
    return "|".join(f"{{{form}}}" if "," in form else form for form in forms)


@cache
def _texts(owner: type) -> dict[str, str]:
    """What the fields of a dataclass are for: the docstring below each, or the comment after it."""
    source = textwrap.dedent(inspect.getsource(owner))
    lines, body, found = source.splitlines(), ast.parse(source).body[0].body, {}  # pyrefly: ignore[missing-attribute]
    for item, below in itertools.zip_longest(body, body[1:]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            doc = below.value if isinstance(below, ast.Expr) else None
            text = doc.value if isinstance(doc, ast.Constant) else lines[item.end_lineno - 1].partition("  # ")[2]
            found[item.target.id] = " ".join(str(text).split())
    return found


def given(words: Iterable[str]) -> set[str]:
    """The names of the options in ``words``, such as ``seq_len``, ``model.dim``; ``--no-flag`` as ``flag``."""
    flags = (option_of(word) for word in words)
    return {flag.lstrip("-").removeprefix("no-").replace("-", "_") for flag in flags if flag}


def option_of(word: str) -> str | None:
    """``--batch-size`` for ``--batch_size=8``; None for anything but an option. A dash and a digit start a number."""
    name = word.split("=", 1)[0]
    return name.replace("_", "-") if re.match(r"--?[a-zA-Z]", name) and name != "-h" else None


def first_word(argv: list[str], otherwise: str, default: str) -> tuple[str, list[str]]:
    """(the word that a command line begins with, its options); ``default`` for help. ``ValueError`` says ``otherwise``
    without one."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    if not {"-h", "--help", "--help-all"} & set(argv):
        raise ValueError(otherwise)
    return default, argv


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
    """The N of ``--nproc N`` in the ``words`` after ``stepgraph train``, or of the run that they resume, if that
    many ranks may be started at once and check the options themselves.

    None for a process that is a rank, for help, and where the options have to be checked first: without a ``--mesh`` of
    that many ranks, with ``--config``, and with ``--max-restarts``, which would start ranks again that refuse them.
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


def require_folder(path: Path | None, option: str = "json") -> None:
    """Raises ValueError, before anything is measured, if the file that ``option`` names could not be written."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option}={path}: the folder {path.parent} does not exist; make it first")
    if path is not None and path.is_dir():
        raise ValueError(f"{option}={path} is a folder: use a file in it")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}={path} cannot be written: use a file in a folder that can be")


def make_folder(path: Path | None, option: str) -> None:
    """Make the folder that ``option`` names. Raises ValueError where that cannot be."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}={path} cannot be a folder: {error.strerror}; use another") from None
