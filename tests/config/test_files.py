"""``--config``: options from a file, with the command line on top."""

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
        ("a.toml", "data = 2020-01-01", "--config .*a.toml: "),
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
        (["--config"], "--config lacks its value"),
        (
            ["--config", str(tmp_path / "a.toml"), "--resume", "x"],
            "--resume x has the options of its run: drop --config",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_train(words)
