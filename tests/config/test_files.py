"""``--config``: options from a file, with the command line on top."""

import dataclasses

import pytest

from stepgraph.cli import parse_train
from stepgraph.config.presets import PRESETS

TOML = """
preset = "golf"
steps = 321
batch-size = 3
betas = [0.8, 0.9]
max_grad_norm = 2

[model]
n_layers = 3
"""


def test_a_toml_file_lies_between_its_preset_and_the_command_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    golf, config = PRESETS["golf"](), parse_train(["--config", str(file), "--steps", "400"])
    assert (config.preset, config.steps, config.batch_size, config.betas) == ("golf", 400, 3, (0.8, 0.9))
    assert config.max_grad_norm == 2.0 and config.lr == golf.lr
    assert config.model.n_layers == 3 and config.model.dim == golf.model.dim
    file.write_text("lr = 0.5\n")
    assert parse_train(["llama3-1b", f"--config={file}"]).lr == 0.5
    assert parse_train(["llama3-1b", f"--config={file}"]).preset == "llama3-1b"


def test_a_table_in_the_models_changes_what_it_names(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "deepseek-v3-debug"\n[model.moe]\nn-experts = 8\n')
    preset, moe = PRESETS["deepseek-v3-debug"]().model.moe, parse_train(["--config", str(file)]).model.moe
    assert moe == dataclasses.replace(preset, n_experts=8)


def test_the_warm_up_of_a_preset_gives_way_to_a_short_run_and_that_of_a_file_does_not(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "llama3-1b"\nsteps = 40\n')
    assert parse_train(["--config", str(file)]).warmup_steps == 4
    assert parse_train(["--config", str(file), "--steps", "20"]).warmup_steps == 2
    (tmp_path / "config.json").write_text(parse_train(["llama3-1b"]).to_json())
    assert parse_train(["--config", str(tmp_path / "config.json"), "--steps", "20"]).warmup_steps == 2
    file.write_text('preset = "llama3-1b"\nwarmup_steps = 30\n')
    with pytest.raises(ValueError, match="warmup_steps=30 must be below steps=20"):
        parse_train(["--config", str(file), "--steps", "20"])


def test_the_config_of_a_run_starts_another_one_like_it(tmp_path):
    first = parse_train(["deepseek-v3-debug", "--steps", "77", "--out", "there", "--model.n-layers", "3"])
    (tmp_path / "config.json").write_text(first.to_json())
    again = parse_train(["--config", str(tmp_path / "config.json"), "--out", "here"])
    assert again.to_json() == first.to_json().replace("there", "here")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "batch_sise = 3", "--config .*a.toml: unknown name .* 'batch_sise': did you mean 'batch_size'"),
        ("a.toml", "steps = 'x'", "--config .*a.toml: steps='x' in a run's configuration must be int"),
        ("a.toml", "steps = ", "--config .*a.toml cannot be read: "),
        ("a.toml", "preset = 'golv'", "--config .*a.toml: unknown preset 'golv': did you mean 'golf'"),
        ("a.toml", "model = 3", "--config .*a.toml: model=3 must be a table"),
        ("a.toml", "data = 2020-01-01", "--config .*a.toml: 2020-01-01 is a date, which no option is: write text in"),
        ("a.toml", "preset = ['golf']", r"--config .*a.toml: preset=\['golf'\] must be a name in quotes"),
        ("a.toml", "lr = 1\nbatch-size = 2\nbatch_size = 3", "--config .*a.toml: batch_size is given twice"),
        ("a.toml", "schedule = 'cos'", "schedule='cos' in a run's configuration must be one of cosine, wsd, constant"),
        ("a.toml", "betas = [0.9]", r"betas=\[0.9\] in a run's configuration must be a list of 2"),
        ("a.toml", "out = ''", "--config .*a.toml: out is empty: set it, or leave it out"),
        ("a.toml", "val-data = ''", "--config .*a.toml: val_data is empty: set it, or leave it out"),
        ("a.toml", "resume = 'there'", "--config .*a.toml: resume continues with the options of its run: use "),
        ("a.toml", "data = ['a.txt', 'b.txt']", "data=.* in a run's configuration must be str"),
        (
            "a.toml",
            "[model]\nfamily = 'golf'",
            "the model of a run lacks dim, .*: provide all of it, or use the stepgraph",
        ),
        ("a.toml", "preset = 'llama3-1b'\nsteps = 12\nwarmup_steps = 12", "warmup_steps=12 must be below steps=12"),
        ("a.json", "[]", "--config .*a.json must hold an object"),
        ("a.yaml", "steps: 3", r"--config .*a.yaml must be FILE.toml, or the config.json of a run"),
    ],
)
def test_what_a_file_cannot_mean_is_one_line(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        parse_train(["--config", str(tmp_path / name)])
    assert "\n" not in str(error.value)


def test_what_does_not_go_together_is_one_line(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    for words, message in [
        (["llama3-1b", "--config", str(tmp_path / "a.toml")], "is of preset 'golf', not 'llama3-1b': leave PRESET out"),
        (["--config", "none.toml"], "cannot read --config none.toml: No such file"),
        (["--config"], "--config: expected one argument"),
        (["--config", str(tmp_path / "a.toml"), "--config=b.toml"], "--config is given twice"),
        (
            ["--config", str(tmp_path / "a.toml"), "--resume", "x"],
            "--resume x has the options of its run: drop --config",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_train(words)
