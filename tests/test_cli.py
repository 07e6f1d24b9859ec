"""The command line as a user meets it: real processes for errors, the parser itself for values."""

import dataclasses
import importlib
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

import stepgraph
from stepgraph import cli
from stepgraph.cli import parse_train
from stepgraph.config import command_line
from stepgraph.config.command_line import require_folder
from stepgraph.config.commands import COMMANDS
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.train.compile import main as compile_step


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "stepgraph", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("golf --nproc 2 --mesh fsdp=2", 2),
        ("--mesh=fsdp=2,tp=2,ep=2 --nproc=4", 4),
        ("--nproc 16 --mesh hsdp=2x4,tp=2", 16),
        ("--resume RUN", 3),
        ("--resume RUN/checkpoints/step-00000001 --steps 9", 3),
        ("--resume RUN --nproc 2 --mesh tp=2", 2),
        # The options are read first.
        ("--nproc 2", None),
        ("--nproc 20 --mesh fsdp=2", None),
        ("--nproc two --mesh fsdp=2", None),
        ("--nproc 2 --mesh ep=2", None),
        ("--nproc 2 --mesh fsdp=2 --max_restarts 1", None),
        ("--nproc 2 --mesh fsdp=2 --config run.toml", None),
        ("--nproc 2 --mesh fsdp=2 --help", None),
        ("--resume RUN --nproc 2", None),
        ("--resume RUN/nowhere", None),
        ("--resume", None),
    ],
)
def test_ranks_that_start_before_the_options_are_read(words, ranks, tmp_path):
    (tmp_path / "config.json").write_text('{"nproc": 3, "mesh": "fsdp=3", "max_restarts": 0}')
    assert command_line.ranks_asked_for(words.replace("RUN", str(tmp_path)).split()) == ranks


def test_the_launcher_imports_torch_and_little_else():
    """The ranks begin when it has."""
    ours = "import sys, stepgraph.train.launch; print(*(n for n in sys.modules if n.startswith('stepgraph.')))"
    done = subprocess.run([sys.executable, "-c", ours], capture_output=True, text=True, check=True)
    assert {name.split(".")[1] for name in done.stdout.split()} == {"errors", "run", "train"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "error: unknown command 'trian': did you mean 'train'?"),
        ("--hlp", "error: unknown option --hlp: did you mean --help?"),
        ("train llama3-8c", "error: unknown preset 'llama3-8c': did you mean 'llama3-8b'?"),
        ("train --lrr 1e-3", "error: unknown option --lrr: did you mean --lr?"),
        ("train golf --lr fast", "error: --lr: 'fast' is not a number"),
    ],
)
def test_an_error_of_use_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message + "\n")


def test_the_folder_of_a_model_is_no_preset(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run("train", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith(
        f": pass it as --init-from-hf {tmp_path}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lr", "--lr: expected one argument"),
        ("--betas 0.9", "--betas: expected 2 arguments"),
        ("--config", "--config: expected one argument"),
        ("--config= --steps 3", "--config: its value is empty"),
        ("--config --steps 3", "--config: expected one argument"),
        ("--resume --steps 3", "--resume: expected one argument"),
        ("--max-grad-norm none", "--max-grad-norm: 'none' is not one of a number, None"),
        ("--expert-chunks 2", "expert_chunks=2 needs expert parallelism: add ep=2 to the mesh"),
        ("--steps 1.5", "--steps: '1.5' is not a whole number"),
        ("--schedule cosin", "--schedule: 'cosin' is not one of cosine, wsd, constant"),
        ("--batch_sise=3", "did you mean --batch-size?"),
        (
            "--no-model.tie-embedding",
            "unknown option --no-model.tie-embedding: did you mean --no-model.tie-embeddings?",
        ),
        ("--no-cuda-grap", "unknown option --no-cuda-grap: did you mean --no-cuda-graph?"),
        ("--model.n-layer 3", "unknown option --model.n-layer: did you mean --model.n-layers?"),
        ("golf --model.max-seq-len 3", "unknown option --model.max-seq-len: see stepgraph train --help"),
        ("--preset golf", "unknown option --preset: see stepgraph train --help"),
        ("-x 1", "unknown option -x: see stepgraph train --help"),
        ("--steps 20 golf", "unexpected 'golf': write stepgraph train [PRESET] [--option VALUE ...]"),
        ("--dump-graphs=yes", "--dump-graphs/--no-dump-graphs: ignored explicit argument 'yes'"),
        ("--model.n-heads 7", "bad value for model: n_heads=7 does not divide dim=384"),
        ("--steps 5 --warmup-steps 10", "warmup_steps=10 must be below steps=5"),
        ("--lr -1", "lr=-1.0 must be above 0"),
        ("--lr inf", "lr=inf must be finite, and above 0"),
        ("--memory budget=lots", "memory budget=lots is neither a size above 0 in GiB nor a share"),
        ("--disable-pass cuda_grap", "unknown pass 'cuda_grap': did you mean 'cuda_graph'"),
        ("--resume no/such/run", "--resume no/such/run is not a run folder"),
        ("golf --passes exact --inductor full", "inductor=full changes nothing with passes=exact: drop one of them"),
        ("--max-skipped 3", "max_skipped=3 changes nothing: add --on-nonfinite skip, or leave it out"),
        ("--decay_fraction=0.1", "decay_fraction=0.1 changes nothing: add --schedule wsd, or leave it out"),
        ("--schedule constant --min-lr-ratio 0.1", "min_lr_ratio=0.1 changes nothing: drop --schedule constant, or"),
        ("deepseek-v3-debug --mesh fsdp=2 --expert-capacity 3", "expert_capacity=3.0 changes nothing: add ep=2 to"),
    ],
)
def test_a_bad_train_option_is_one_line(arguments, message):
    with pytest.raises(ValueError) as error:
        parse_train(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_passes_that_other_options_need_may_be_named():
    assert parse_train(["--passes", "default", "--inductor", "off", "--tiles", "2"]).passes == "default"


@pytest.mark.parametrize("option", ["out", "resume", "saved-steps", "data", "tokenizer", "data-cache", "mesh", "steps"])
def test_an_empty_value_is_refused(option):
    for words in ([f"--{option}="], [f"--{option}", ""], ["--lr", "1", f"--{option}", "", "--lr", "1"]):
        with pytest.raises(ValueError, match=rf"^--{option}: its value is empty"):
            parse_train(words)
    assert parse_train(["--sample-every", "50", "--sample-prompt", ""]).sample_prompt == ""


def test_a_short_run_shortens_the_warmup_of_its_preset():
    assert parse_train(["llama3-1b", "--steps", "12"]).warmup_steps == 1
    assert parse_train(["llama3-1b", "--steps", "600"]).warmup_steps == 500
    assert parse_train(["llama3-1b", "--steps=12", "--warmup-steps", "3"]).warmup_steps == 3


def test_a_short_resumed_run_shortens_its_warmup(tmp_path):
    (tmp_path / "config.json").write_text(TrainConfig().to_json())
    assert parse_train(["--resume", str(tmp_path), "--steps", "2"]).warmup_steps == 0
    assert parse_train(["--resume", str(tmp_path), "--steps", "200"]).warmup_steps == 10


HELP = (
    *("--help", "--version", "train --help", "train golf -h", "compile -h", "plan -h", "inspect --help"),
    *("sample --help", "export -h", "bench --help", "bench step --help", "bench train -h", "bench model -h"),
    *("bench norm --help", "bench report -h"),
)


def test_help_and_wrong_names_answer_before_anything_heavy_is_loaded():
    code = (
        "import sys, time\n"
        "from stepgraph import cli\n"
        "for words in sys.argv[1:]:\n"
        "    began = time.process_time()\n"
        "    try: cli.main(words.split())\n"
        "    except SystemExit as stop: print('status', stop.code, time.process_time() - began)\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'matplotlib') if name in sys.modules])\n"
        "print(time.process_time())\n"
    )
    wrong = ["train --lrr 1", "train --wandb x", "plan golf --memry 1", "trian", "bench norm --step 1"]
    wrong += ["train llama3-8c", "train golf --lr fast", "plan golf --gpu h9", "bench step --steps many"]
    done = subprocess.run([sys.executable, "-c", code, *wrong, *HELP], capture_output=True, text=True, check=True)
    *lines, loaded, total = done.stdout.splitlines()
    answers = [line.split() for line in lines if line.startswith("status ")]
    assert [code for _, code, _ in answers] == ["2"] * len(wrong) + ["0"] * len(HELP)
    spent = [float(seconds) for *_, seconds in answers]
    start = float(total) - sum(spent)  # Python's own and the imports, which each command has
    assert start + max(spent) < 2 and loaded == "[]"
    assert "unknown option --lrr: did you mean --lr?" in done.stderr


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--wandb", "here it is --log wandb"),
        ("--num-train-epochs", "here it is --epochs"),
        ("--learning_rate", "here it is --lr"),
        ("--output-dir", "here it is --out"),
        ("--gradient-accumulation-steps", "here it is --accumulate"),
        ("--per-device-train-batch-size", "here it is --batch-size"),
        ("--max-steps", "here it is --steps"),
        ("--tp", "here it is --mesh tp=N"),
        ("--gpus", "here it is --nproc"),
        ("--max-length", "here it is --seq-len"),
        ("--model", "here it is --init-from-hf FOLDER, or a preset as the first word"),
        ("--bf16", "here it is --precision bf16, or bf16-autocast"),
        ("--step", "did you mean --steps?"),
        ("--profil", "did you mean --profile?"),
        ("--batch", "did you mean --batch-size?"),
        ("--warmup", "did you mean --warmup-steps?"),
        ("--layers", "did you mean --model.n-layers?"),
        ("--n_layers", "did you mean --model.n-layers?"),
    ],
)
def test_a_hint_is_near_or_there_is_none(given, hint, capsys):
    assert exit_status("train", given, "3") == 2
    assert capsys.readouterr().err == f"error: unknown option {given}: {hint}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_has_a_text_and_reads_its_own_default(command):
    """What a command takes is declared once, in dataclasses; none of its names is there twice."""
    options = [option for kind in COMMANDS[command][1] for option in command_line.options_of(kind())]
    assert len({option.flag for option in options}) == len(options) > 0 or command == "bench report"
    for option in options:
        text = command_line._texts(option.owner)[option.path[-1]]
        assert text and text[0] != " " and text.endswith((".", ";", "*"))
        items = option.value if isinstance(option.value, tuple) else (option.value,)
        if option.kind is not bool:
            assert [command_line._reads(option)["type"](str(item)) for item in items] == list(items)


def test_the_public_names_are_there_and_importing_a_room_replaces_none():
    assert [name for name in stepgraph.__all__ if getattr(stepgraph, name).__name__ != name] == []
    assert {*stepgraph.__all__} <= {*dir(stepgraph)}
    stepgraph.capture = importlib.import_module("stepgraph.capture")  # as importing the room does
    assert stepgraph.capture is importlib.import_module("stepgraph.step").capture
    with pytest.raises(AttributeError, match="module 'stepgraph' has no attribute 'captur'"):
        _ = stepgraph.captur


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--version"], f"stepgraph {stepgraph.__version__}, torch {version('torch')}, triton"),
        (["--help"], "usage: stepgraph COMMAND"),
        ([], "usage: stepgraph COMMAND"),
        (["plan", "--help-all"], "usage: stepgraph plan PRESET"),
    ],
)
def test_version_and_help(arguments, shown, capsys):
    assert exit_status(*arguments) == 0
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_a_terminal_cannot_spell_is_no_error(encoding, monkeypatch, tmp_path):
    with (tmp_path / "said").open("w+", encoding=encoding) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(cli, "_dispatch", lambda words: parse_train(words) and print("é €"))
        for words in ([], ["--lr"], ["--schedule", "cosin"], ["--lr", "x"]):
            with pytest.raises(SystemExit):
                cli.main(words)
        stream.seek(0)
        spelled, *errors = stream.read().splitlines()
    assert spelled == "é €".encode(encoding, "backslashreplace").decode(encoding)
    assert errors == [
        "error: --lr: expected one argument",
        "error: --schedule: 'cosin' is not one of cosine, wsd, constant",
        "error: --lr: 'x' is not a number",
    ]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "stepgraph"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written ([Errno 28] No space left on device)\n"


def test_a_process_may_start_without_streams():
    run = f"{sys.executable} -m stepgraph"
    assert subprocess.run(["sh", "-c", f"{run} <&- >&- 2>&- && {run} nothing <&- >&- 2>&-"]).returncode == 2


COLLECTED = """
import gc, sys, types
from stepgraph import __main__, cli
from stepgraph.train import trainer
from stepgraph.train import compile as compiler
def told(given):
    print(gc.isenabled(), gc.get_freeze_count() > 100_000)
    return 0
trainer.run = compiler.main = told
sys.modules["probe"], cli._MODULES["plan"] = types.SimpleNamespace(main=told), "probe"
__main__.run()
"""


@pytest.mark.parametrize("command", ["train", "compile", "plan"])
def test_the_collector_is_on_while_a_command_runs_but_leaves_what_was_imported(command):
    words = [sys.executable, "-c", COLLECTED, command, "llama3-debug"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "True True\n"


def test_our_warnings_are_one_line_and_those_of_others_stay(monkeypatch):
    said = []

    def dispatch(_):
        for place in (stepgraph.__file__, "/other/file.py"):
            said.append(warnings.formatwarning("the step is\nnot saved", UserWarning, place, 3, "its source"))
        return 0

    before = warnings.formatwarning
    monkeypatch.setattr(cli, "_dispatch", dispatch)
    with pytest.raises(SystemExit):
        cli.main([])
    theirs = warnings.formatwarning("the step is\nnot saved", UserWarning, "/other/file.py", 3, "its source")
    assert said == ["warning: the step is not saved\n", theirs] and warnings.formatwarning is before


def test_an_interruption_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert exit_status("bench", "step") == 130
    assert capsys.readouterr().err == "interrupted\n"


def helped(capsys, *words):
    assert exit_status(*words) == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_the_first_options_and_help_all_every_one_with_its_text(capsys):
    short, every = helped(capsys, "train", "--help"), helped(capsys, "train", "--help-all")
    options = [f"--{f.name.replace('_', '-')} " for f in dataclasses.fields(TrainConfig) if f.name != "preset"]
    assert 12 <= sum(option in short for option in options) <= 20
    assert [option for option in options if option.replace(" ", "") not in every.replace(",", " ")] == []
    assert "Peak learning rate. (default: 0.002)" in short and "--help-all" in short
    assert f"(default: {PRESETS['llama3-debug']().steps})" in short and all(name in short for name in PRESETS)
    assert "--model.n-layers N" in every and "ValueError" not in every
    assert "--model.moe.top-k N" in helped(capsys, "train", "deepseek-v3-debug", "--help-all")
    for command in ("plan", "inspect", "sample", "export"):
        assert f"usage: stepgraph {command} " in helped(capsys, command, "--help")
    step = helped(capsys, "bench", "step", "--help")
    assert "--providers" in step and "(default: eager,compile," in step and "--norm" not in step


def test_compile_help_says_what_it_does_with_the_options_of_train(capsys):
    shown = helped(capsys, "compile", "--help")
    assert "Compile the step that stepgraph train would run" in shown and "Train a language model" not in shown


def test_no_preset_is_llama3_debug():
    assert parse_train([]) == PRESETS["llama3-debug"]()


def test_options_override_the_preset():
    words = "golf --steps=300 --lr 5e-4 --betas 0.8 0.9 --no-cuda-graph --dump-graphs --model.n_layers 3 --out a/b"
    config = parse_train([*words.split(), "--disable-pass", "cuda_graph", "--disable-pass", "dead_code"])
    golf = PRESETS["golf"]()
    assert config == dataclasses.replace(
        golf,
        steps=300,
        lr=5e-4,
        betas=(0.8, 0.9),
        cuda_graph=False,
        dump_graphs=True,
        model=dataclasses.replace(golf.model, n_layers=3),
        out=Path("a/b"),
        disable_pass=("cuda_graph", "dead_code"),
    )


@pytest.mark.parametrize("form", [["--resume", "{}"], ["--resume={}"]])
def test_resume_takes_the_runs_own_configuration(tmp_path, form):
    ran = dataclasses.replace(PRESETS["golf"](), seed=7, lr=1.25e-4, out=Path("elsewhere"))
    (tmp_path / "config.json").write_text(ran.to_json())
    words = [word.format(tmp_path) for word in form]
    resumed = dataclasses.replace(ran, out=None, resume=tmp_path)
    assert parse_train(words) == resumed
    assert parse_train(["golf", *words]) == resumed
    assert parse_train([*words, "--steps", "9000"]) == dataclasses.replace(resumed, steps=9000)
    with pytest.raises(ValueError, match="is a run of preset 'golf', not 'llama3-1b'"):
        parse_train(["llama3-1b", *words])


@pytest.mark.parametrize("text", ['{"steps": 3}', "", TrainConfig().to_json()[:200], "\x00\x00"])
def test_resume_names_a_damaged_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: ") as error:
        parse_train(["--resume", str(tmp_path)])
    assert "\n" not in str(error.value)


def install(monkeypatch, name, **functions):
    """Puts a module ``stepgraph.NAME`` in place, to see what the command line calls and with what."""
    module = type(sys)(f"stepgraph.{name}")
    vars(module).update(functions)
    package, _, leaf = module.__name__.rpartition(".")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.import_module(package), leaf, module, raising=False)


def exit_status(*arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return stop.value.code


def test_other_trainers_names_lead_to_options_that_exist():
    ours = {words.split()[0] for words in command_line.ELSEWHERE.values()}
    names = set(command_line._flags(command_line.options_of(TrainConfig())))
    assert ours <= names and not {*command_line.ELSEWHERE} & names


def test_train_and_bench_end_with_the_status_of_what_they_call(monkeypatch):
    calls = []
    install(monkeypatch, "train.trainer", run=lambda config: calls.append(config.steps) or 130)
    install(monkeypatch, "bench", main=lambda arguments: calls.append(arguments) or 3)
    assert exit_status("train", "golf", "--steps", "777") == 130
    assert exit_status("bench", "step", "--json", "x.json") == 3
    assert calls == [777, ["step", "--json", "x.json"]]


def test_an_error_for_people_is_one_line_and_a_defect_keeps_its_traceback(monkeypatch, capsys):
    def refuse(config):
        raise ValueError("data file is empty:\n  give another")

    def break_down(config):
        raise RuntimeError("a defect")

    install(monkeypatch, "train.trainer", run=refuse)
    assert exit_status("train") == 2
    assert capsys.readouterr().err == "error: data file is empty: give another\n"
    install(monkeypatch, "train.trainer", run=break_down)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["train"])


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"html=.* is a folder: use a file in it"):
        require_folder(tmp_path, "html")
    (tmp_path / "steps").touch()
    with pytest.raises(ValueError, match=r"out=.*steps is a file: use a folder"):
        compile_step(parse_train(["--out", str(tmp_path / "steps")], "compile"))
    monkeypatch.setattr("stepgraph.config.command_line.os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=r"json=.*x.json cannot be written: use a file in a folder that can be"):
        require_folder(tmp_path / "x.json")


def test_without_docstrings_everything_is_imported(tmp_path):
    code = "import stepgraph; from stepgraph import passes; print(len(passes.PASSES))"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20


def test_without_triton_everything_of_a_run_is_imported():
    """As README's first command installs it: on a CPU torch brings none."""
    code = "import sys; sys.modules['triton'] = None; import stepgraph.train.trainer, stepgraph.passes.compile.inductor"
    subprocess.run([sys.executable, "-c", code], check=True)
