"""The ``stepgraph`` command: parse and dispatch, nothing else.

A usage error prints one line to stderr and exits with status 2, Ctrl-C with 130, and a full disk with 1. Any other
exception keeps its traceback.
"""

import contextlib
import dataclasses
import errno
import gc
import importlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from stepgraph.config.command_line import (
    Option,
    check_names,
    options_of,
    parse,
    ranks_asked_for,
    read_values,
    run_of,
    show_help,
    value_of,
)
from stepgraph.config.commands import COMMANDS, MORE
from stepgraph.config.presets import DEFAULT, PRESETS, fine_tuning, settings
from stepgraph.errors import INTERRUPTED, end_process, unknown_name, unknown_option
from stepgraph.options import StepOptions

if TYPE_CHECKING:
    from stepgraph.config.train import TrainConfig

USAGE = """usage: stepgraph COMMAND [options]

Capture a transformer's whole training step as one FX graph, rewrite it with explicit passes, run it.

commands:
  train [PRESET] [options]   train a model (default preset: llama3-debug)
  compile [PRESET] [options] compile a run's step ahead of time, for train --saved-steps FOLDER
  bench NAME [options]       measure stepgraph next to eager, torch.compile and others
  plan PRESET [options]      forecast a step on a GPU cluster, without GPUs
  sample RUN --prompt TEXT   generate text with a run's model
  export RUN --out FOLDER    write a run's model and tokenizer as a Hugging Face checkpoint
  inspect RUN|PRESET         write a step's HTML page: time, memory, passes, nodes

stepgraph COMMAND --help shows a command's options.

options:
  -h, --help                 show this text and exit
  --version                  show the versions of stepgraph, torch and Python and exit
"""

#: Command -> the module whose `main` runs it, imported when it does.
_MODULES = {
    "bench": "stepgraph.bench",
    "plan": "stepgraph.inspect.forecast.command",
    "inspect": "stepgraph.inspect.account.command",
    "sample": "stepgraph.train.sample",
    "export": "stepgraph.train.saving",
}

#: The exit status of a program that the signal of a broken pipe ends.
_READER_GONE = 141

#: Seconds after which a command that still imports says so.
_SPEAKS_AFTER_S = 5

#: For the commands that take the options of a run.
_DESCRIPTIONS = {
    "train": "Train a language model with one captured step graph. --config FILE.toml, or a run's config.json, sets "
    "defaults for the other options.",
    "compile": "Compile the step that stepgraph train would run with these options, without training, and save it in "
    "the folder --out, for stepgraph train --saved-steps FOLDER.",
}

_HOUSE = Path(__file__).parent


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command line ``argv`` (default: that of the process) and exits with its status."""
    arguments = sys.argv[1:] if argv is None else argv
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # a process may start without
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # samples have letters that not every terminal knows
    try:
        with _plain_warnings():
            status = _status(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # of `stepgraph --help | head`
        _silence(sys.stderr, sys.stdout)
        status = _READER_GONE
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        _silence(sys.stdout)
        print(f"error: the output cannot be written ({error})", file=sys.stderr)
        status = 1
    sys.exit(status)


def _silence(*streams: TextIO) -> None:
    """Discard what these ``streams`` still buffer, or Python would try to write it again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Inside, our own warnings are one line without a source location, like errors."""
    before = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any) -> str:
        if category is UserWarning and Path(filename).is_relative_to(_HOUSE):
            return f"warning: {' '.join(str(message).split())}\n"
        return before(message, category, filename, *where, **more)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


def _status(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except ValueError as error:
        _print_error(" ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:  # training saves and ends on its own
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _print_error(error: str) -> None:
    """Print a usage error; if several ranks have the same one, only the first prints it."""
    if "RANK" in os.environ:
        from stepgraph import parallel

        if not parallel.says_first(error):
            return
    print("error:", error, file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    # A command is imported where it is called, so that help and wrong names do not wait for its libraries.
    full, options = command, rest
    if command == "bench" and rest:
        full, options = f"bench {rest[0]}", rest[1:]
    if full in COMMANDS and _helped(full, options):
        return 0
    # Ranks import torch at once, unless this process must check their options first.
    nproc = ranks_asked_for(rest) if command == "train" else None
    if full in COMMANDS and not nproc:
        _load_torch()
    match command:
        case "-h" | "--help":
            print(USAGE, end="")
            return 0
        case "--version":
            from stepgraph.config.environment import package_versions

            print(", ".join(f"{name} {version or '(not installed)'}" for name, version in package_versions().items()))
            return 0
        case "train":
            from stepgraph.train.launch import end_with_launcher

            end_with_launcher()
            if nproc:
                from stepgraph.train.launch import launch

                return launch(nproc, rest)
            config = parse_train(rest)

            from stepgraph import parallel

            if config.nproc not in (None, 1) and not parallel.launched():
                from stepgraph.train.launch import launch

                return launch(config.nproc, rest, config.max_restarts)

            from stepgraph.train import trainer

            _collect()
            return trainer.run(config)
        case "compile":
            from stepgraph.train import compile as compiler

            _collect()
            return compiler.main(parse_train(rest, "compile"))
    if command in _MODULES:
        module = importlib.import_module(_MODULES[command])
        _collect()
        return module.main(rest)
    if command.startswith("-"):
        raise unknown_option(command, ["--help", "--version"])
    raise unknown_name("command", command, ["train", "compile", *_MODULES])


def _collect() -> None:
    """Let Python's collector begin, if `__main__` has put it off, but not look at what is imported, which stays."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _load_torch() -> None:
    """Import torch, which a slow disk makes long: then a line says so. Ctrl-C ends the process meanwhile: raised inside
    an import, KeyboardInterrupt can be swallowed or become an ImportError."""
    timer = threading.Timer(_SPEAKS_AFTER_S, partial(print, "loading torch", file=sys.stderr, flush=True))
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0":
        timer.start()
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # ranks start with it blocked
    try:
        import torch  # noqa: F401
    finally:
        timer.cancel()
        if signal.getsignal(signal.SIGINT) is _end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(*_: object) -> NoReturn:
    end_process(INTERRUPTED, "interrupted" if os.environ.get("RANK", "0") == "0" else "")


def _helped(command: str, words: list[str]) -> bool:
    """Whether ``words`` ask for help that needs no model, which is printed. Raises ValueError for a wrong option."""
    arguments, kinds = COMMANDS[command]
    models = StepOptions in kinds
    options = [option for kind in kinds for option in options_of(kind())]
    check_names(words, f"stepgraph {command}", options, MORE.get(command, ()), models=not models)
    if {"-h", "--help"} & set(words):
        defaults = settings(DEFAULT) if command in ("train", "compile") else {}
        shown = [option._replace(value=defaults.get(option.path[-1], option.value)) for option in options]
        text = (_DESCRIPTIONS.get(command) or kinds[-1].__doc__ or "") + f" Presets: {', '.join(PRESETS)}." * models
        show_help(f"stepgraph {command} {arguments}".rstrip(), text, shown)
        return True
    if words and not words[0].startswith("-") and command in ("train", "compile", "plan"):
        _refuse_unknown(words[0], command)
    read_values(words, f"stepgraph {command} {arguments}", options)  # a bad value does not wait for torch either
    return False


def _refuse_unknown(preset: str, command: str) -> None:
    if command == "train" and (Path(preset) / "config.json").is_file():
        raise ValueError(f"{preset} is the folder of a model, not a preset: pass it as --init-from-hf {preset}")
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)


def parse_train(arguments: list[str], command: str = "train") -> "TrainConfig":
    """The configuration that ``stepgraph train ARGUMENTS`` (or ``compile``) asks for, of a preset or a run, overridden.

    Raises ValueError, in one line, for an unknown preset or option and for a bad value.
    """
    from stepgraph.config.idle import refuse_idle, refuse_unused
    from stepgraph.models.hf_decoder import downloaded

    named = bool(arguments) and not arguments[0].startswith("-")
    preset, options = (arguments[0], arguments[1:]) if named else (DEFAULT, arguments)
    _refuse_unknown(preset, command)
    default = PRESETS[preset]()
    file, options = _without_config(options)
    if name := value_of("--init-from-hf", options):
        options = [word.replace(name, downloaded(name)) if "--init-from-hf" in (word, before) else word
                   for before, word in zip(("", *options), options, strict=False)]  # fmt: skip
    given: set[str] = set()
    if file:
        from stepgraph.config.files import read_config

        if value_of("--resume", options):
            raise ValueError(f"--resume {value_of('--resume', options)} has the options of its run: drop --config")
        default, given = read_config(Path(file), preset if named else None, value_of("--init-from-hf", options))
        if named and default.preset != preset:
            raise ValueError(f"--config {file} is of preset {default.preset!r}, not {preset!r}: leave PRESET out")
    elif (folder := value_of("--init-from-hf", options)) and not named and Path(folder).is_dir():
        default = fine_tuning(
            Path(folder), lora=bool(value_of("--lora", options)), dpo=value_of("--loss", options) == "dpo"
        )
    if resume := value_of("--resume", options):
        default = _resumed(Path(resume), preset if named else None)
    written = {name for name in ("steps", "epochs") if value_of(f"--{name}", options)}
    in_file = {"steps", "epochs"} & given if file and file.endswith(".toml") else set()
    if 2 in (len(written), len(in_file)):
        raise ValueError("steps and epochs are both given: drop one")
    if written == {"steps"}:
        default = dataclasses.replace(default, epochs=None)
    if "warmup_steps" not in given and written != {"epochs"} and default.epochs is None:
        words = value_of("--steps", options) or ""
        steps = int(words) if words.isdecimal() else default.steps
        if default.warmup_steps >= steps:
            default = dataclasses.replace(default, warmup_steps=steps // 10)  # the preset is for long runs

    (config,) = parse(options, f"stepgraph {command} [PRESET]", default, description=_DESCRIPTIONS[command])
    config.validate()
    refuse_idle(config, options)
    refuse_unused(config, options)
    return config


def _without_config(options: list[str]) -> tuple[str | None, list[str]]:
    """The value of ``--config``, and the options without it."""
    values, rest = read_values(options, "stepgraph train", [Option(("config",), tuple[str, ...], (), type)])
    files = values.get("--config", [])
    if len(files) > 1:
        raise ValueError("--config is given twice: put all options into one file")
    return (files[0] if files else None), rest


def _resumed(folder: Path, preset: str | None) -> "TrainConfig":
    """The configuration of the run that ``folder`` is or lies in, ready to be continued there."""
    from stepgraph.config.files import run_config

    config = run_config(folder, "--resume")
    if preset not in (None, config.preset):
        raise ValueError(f"--resume {folder} is a run of preset {config.preset!r}, not {preset!r}: leave PRESET out")
    saved = any((run_of(folder) / "checkpoints").glob("step-*"))  # else it begins again
    return dataclasses.replace(config, resume=folder, out=None, init_from_hf=None if saved else config.init_from_hf)
