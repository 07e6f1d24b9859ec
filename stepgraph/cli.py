"""The ``stepgraph`` command: parse and dispatch, nothing else.

Errors of use end in one line on stderr and exit status 2; any other exception keeps its traceback.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stepgraph.errors import unknown_name

if TYPE_CHECKING:
    from stepgraph.train.config import TrainConfig

USAGE = """usage: stepgraph COMMAND [options]

Capture a transformer's whole training step as one FX graph, rewrite it with explicit passes, run it.

commands:
  train [PRESET] [options]   train a model (default preset: llama3-debug); see stepgraph train --help
  bench NAME [options]       measure it beside eager and torch.compile; see stepgraph bench --help

options:
  -h, --help                 show this text and exit
  --version                  show the versions of stepgraph, torch and Python and exit
"""

DEFAULT_PRESET = "llama3-debug"

# tyro's words (a pattern over the whole message) -> ours.
_PLAIN = [
    (r"^Unrecognized options: (.*)", r"unexpected \1: write stepgraph train [PRESET] [--option VALUE ...]"),
    (r"^Missing value for argument '(\S+)'\. Expected (\d+) values\.", r"\1 lacks its value: it takes \2"),
    (
        r"^invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*?),?\)\.",
        r"bad value for \2: \1 is not one of \3",
    ),
    (r"^Error parsing (\S+):", r"bad value for \1:"),
]


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command line ``argv`` (default: that of the process) and exits with its status."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        status = _dispatch(arguments)
    except ValueError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        status = 2
    sys.exit(status)


def _dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    # A command is imported where it is called, so that help and errors of use do not wait for its libraries.
    match command:
        case "-h" | "--help":
            print(USAGE, end="")
            return 0
        case "--version":
            from stepgraph.train.environment import package_versions

            print(", ".join(f"{name} {version or '(not installed)'}" for name, version in package_versions().items()))
            return 0
        case "train":
            config = parse_train(rest)

            from stepgraph.train import trainer

            return trainer.run(config)
        case "bench":
            from stepgraph import bench

            return bench.main(rest)
    if command.startswith("-"):
        raise _unknown_option(command, ["--help", "--version"])
    raise unknown_name("command", command, ["train", "bench"])


def parse_train(arguments: list[str]) -> "TrainConfig":
    """The configuration that ``stepgraph train ARGUMENTS`` asks for: a preset, or a run to resume, with overrides.

    Raises ValueError, in one line, for an unknown preset or option and for a bad value. ``--help`` prints and exits.
    """
    import tyro

    from stepgraph.train.config import TrainConfig
    from stepgraph.train.presets import PRESETS

    named = bool(arguments) and not arguments[0].startswith("-")
    preset, options = (arguments[0], arguments[1:]) if named else (DEFAULT_PRESET, arguments)
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
    default = PRESETS[preset]()
    if resume := _value_of("--resume", options):
        default = _resumed(Path(resume), preset if named else None)

    _check_option_names(options, default)
    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            config = tyro.cli(
                TrainConfig,
                prog="stepgraph train [PRESET]",
                description=f"{TrainConfig.__doc__} Presets: {', '.join(PRESETS)}. Defaults below: {default.preset}.",
                args=options,
                default=default,
            )
        except SystemExit as stop:
            if stop.code == 0:  # --help
                raise
            raise ValueError(_one_line(box.getvalue())) from None
    config.validate()
    return config


def _resumed(folder: Path, preset: str | None) -> "TrainConfig":
    """The configuration of the run in ``folder``, ready to be continued there."""
    from stepgraph.train.config import TrainConfig

    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"--resume {folder} is not a run folder (it has no config.json): give the folder of a run")
    try:
        config = TrainConfig.from_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if preset not in (None, config.preset):
        raise ValueError(f"--resume {folder} is a run of preset {config.preset!r}, not {preset!r}: leave PRESET out")
    return dataclasses.replace(config, resume=folder, out=None, init_from_hf=None)


def _value_of(option: str, options: list[str]) -> str | None:
    """The last value given to ``option``, as ``--option VALUE`` or ``--option=VALUE``."""
    value = None
    for position, word in enumerate(options):
        if word.startswith(option + "="):
            value = word.removeprefix(option + "=")
        elif word == option and position + 1 < len(options):
            value = options[position + 1]
    return value


def _check_option_names(options: list[str], default: "TrainConfig") -> None:
    """Refuses the first unknown option with the nearest one: tyro's own answer takes a boxed page."""
    allowed = ["--help", *_option_names(default, "")]
    for word in options:
        name = word.split("=", 1)[0]
        # A dash and a digit start a negative number.
        if re.match(r"--?[a-zA-Z]", name) and name != "-h" and name.replace("_", "-") not in allowed:
            raise _unknown_option(name, allowed)


def _option_names(config: object, prefix: str) -> typing.Iterator[str]:
    """Every option that tyro makes of a dataclass: ``--name``, ``--no-name`` for a flag, ``--outer.name``."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _option_names(value, f"{prefix}{name}.")
        # A group that the default leaves out (None) has no options.
        elif field.name != "preset" and not any(map(dataclasses.is_dataclass, typing.get_args(hints[field.name]))):
            yield f"--{prefix}{name}"
            if isinstance(value, bool):
                yield f"--{prefix}no-{name}"


def _unknown_option(given: str, allowed: list[str]) -> ValueError:
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    return ValueError(f"unknown option {given}: " + (f"did you mean {near[0]}?" if near else "see stepgraph --help"))


def _one_line(box: str) -> str:
    """The message in tyro's boxed error, without its frame and its advice."""
    lines = [line.strip("│╭╮╰╯─ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    message = []
    for line in lines[1:]:  # the first line is the box's title
        if not line:  # a rule: the advice follows
            break
        message.append(line)
    text = " ".join(message)
    for pattern, plain in _PLAIN:
        text = re.sub(pattern, plain, text)
    return text
