"""Command-line options from dataclasses: tyro parses them, and every error of use is one line with one fix."""

import contextlib
import dataclasses
import io
import itertools
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepgraph.config.option_names import option_of
from stepgraph.errors import unknown_option
from stepgraph.passes import Pass, StepOptions, Target, resolve
from stepgraph.passes.options import choices

T = typing.TypeVar("T")

#: A machine on which every pass may run.
ANY = Target("cuda", process_groups=True)

# tyro's words (a pattern over the whole message) -> ours; {usage} is the command's own form.
_PLAIN = [
    (r"^Unrecognized options: (.*)", r"unexpected \1: write {usage}"),
    (r"^Missing value for argument '(\S+)'\. Expected (\d+) values\.", r"\1 lacks its value: it takes \2"),
    (
        r"^invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*?),?\)\.",
        r"bad value for \2: \1 is not one of \3",
    ),
    (
        r"no type matching \{None\}\|(\S+) could be instantiated from \['(.*)'\]\.",
        r"'\2' is neither None nor of type \1",
    ),
    (r"^Error parsing (\S+):", r"bad value for \1:"),
    (r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number"),
    (r"could not convert string to float: (.*)", r"\1 is not a number"),
]


def parse(default: T, options: list[str], *, usage: str, description: str) -> T:
    """``default``, a dataclass, with the fields that ``options`` set; ``--help`` prints and exits.

    ``usage`` is the command with its arguments, such as ``stepgraph train [PRESET]``. A field named ``preset`` is no
    option. Raises ValueError, in one line, for an unknown option (with the nearest one) and for a bad value.
    """
    import tyro

    _check_names(options, default, usage)
    _check_empty(options, default)
    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            append = (tyro.conf.UseAppendAction,)  # a list grows by --name VALUE, given again and again
            return tyro.cli(
                type(default), prog=usage, description=description, args=options, default=default, config=append
            )
        except SystemExit as stop:
            if stop.code == 0:  # --help
                raise
            raise ValueError(_one_line(box.getvalue(), usage)) from None


def refuse_idle(options: StepOptions, words: list[str], target: Target = ANY) -> None:
    """Raises ValueError for an option of the step that ``words`` give although no value of it would change the passes
    for ``target``. What is off may be said to be off."""
    passes = resolve(options, (), target)
    for name, allowed in choices().items():
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        given = any(word.split("=")[0].replace("_", "-") == flag for word in words)
        others = [dataclasses.replace(options, **{name: other}) for other in allowed if other != value]
        if given and value != "off" and all(_same(other, passes, target) for other in others):
            where = "in a forecast: leave it out" if target.simulated else "with passes=exact: drop one of them"
            raise ValueError(f"{name}={value} changes nothing {where}")


#: Options that change nothing without another: what has to hold, and how to have it so.
_NEEDED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_skipped": (lambda config: config.on_nonfinite == "skip", "add --on-nonfinite skip"),
    "decay_fraction": (lambda config: config.schedule == "wsd", "add --schedule wsd"),
    "min_lr_ratio": (lambda config: config.schedule != "constant", "drop --schedule constant"),
    "expert_capacity": (lambda config: config.mesh_spec and config.mesh_spec.ep > 1, "add ep=2 to --mesh"),
}


def refuse_unused(config: object, words: list[str]) -> None:
    """Raises ValueError for an option of a run that ``words`` give and that changes nothing with the others."""
    given = {option_of(word) for word in words}
    for name, (holds, fix) in _NEEDED.items():
        if f"--{name.replace('_', '-')}" in given and not holds(config):
            raise ValueError(f"{name}={getattr(config, name)} changes nothing: {fix}, or leave it out")


def _same(options: StepOptions, passes: list[Pass], target: Target) -> bool:
    """Whether ``options`` lead to ``passes``, or to none because they do not go together."""
    with contextlib.suppress(ValueError):
        return resolve(options, (), target) == passes
    return True


def _check_names(options: list[str], default: object, usage: str) -> None:
    """Refuses the first unknown option with the nearest one: tyro's own answer takes a boxed page."""
    allowed = ["--help", *_names(default, "")]
    for word in options:
        if (name := option_of(word)) is not None and name not in allowed:
            raise unknown_option(word.split("=", 1)[0], allowed, " ".join(w for w in usage.split() if w.islower()))


def _check_empty(options: list[str], default: object) -> None:
    """Refuses the first option that is given an empty text, as of a shell's variable that is not set, and whose own
    default is not empty: an empty path would be the folder that this runs in."""
    for word, behind in itertools.zip_longest(options, options[1:]):
        name, given, value = word.partition("=")
        if (plain := option_of(word)) is None or (value if given else behind) != "":
            continue
        if getattr(default, plain.lstrip("-").replace("-", "_"), None) != "":
            raise ValueError(f"{name} is given an empty value: give one, or leave it out")


def _names(config: object, prefix: str) -> typing.Iterator[str]:
    """Every option that tyro makes of a dataclass: ``--name``, ``--no-name`` for a flag, ``--outer.name``."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _names(value, f"{prefix}{name}.")
        # A group that the default leaves out (None) has no options.
        elif field.name != "preset" and not any(map(dataclasses.is_dataclass, typing.get_args(hints[field.name]))):
            yield f"--{prefix}{name}"
            if isinstance(value, bool):
                yield f"--{prefix}no-{name}"


def _one_line(box: str, usage: str) -> str:
    """The message in tyro's boxed error, without its frame and its advice. A frame in ASCII has a rule below the title,
    and no sides."""
    lines = [line.strip("│╭╮╰╯─ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    lines = ["" if set(line) == {"-"} else line for line in lines][1:]  # the first is the title
    message = itertools.dropwhile(lambda line: not line, lines)
    text = " ".join(itertools.takewhile(bool, message))  # up to a rule, behind which the advice is
    for pattern, plain in _PLAIN:
        text = re.sub(pattern, plain.replace("{usage}", f"{usage} [--option VALUE ...]"), text)
    return text


def require_folder(path: Path | None, option: str = "json") -> None:
    """Raises ValueError, before anything is measured, if the file that ``option`` names could not be written."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option}={path}: the folder {path.parent} does not exist; make it first")
    if path is not None and path.is_dir():
        raise ValueError(f"{option}={path} is a folder: give a file in it")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}={path} cannot be written: give a file in a folder that can be")


def require_chart(path: Path | None) -> None:
    """Raises ValueError, before anything is measured, if the chart that ``--plot`` names could not be written."""
    require_folder(path, "plot")
    if path is not None and path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"plot={path}: a chart is a .png, .pdf or .svg file; give it such a name")
