"""A family of models is one record: another one trains, is validated and is forecast without a change elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepgraph
from stepgraph.models import FAMILIES, GolfConfig, family_named, family_of
from stepgraph.models.family import Family

#: What the folder of a new family, the list of families and the list of presets would say.
SCRIPT = """
import contextlib
import io
import json
import sys
from dataclasses import dataclass

from torch import nn

from stepgraph.models import FAMILIES, Family
from stepgraph.models.init import init_parameters


@dataclass(frozen=True)
class TinyConfig:
    dim: int = 16
    n_layers: int = 2
    vocab_size: int = 320
    most: int = 32
    score_flops = 0

    def num_params(self, *, lookup_table=True, active=False):
        return self.dim * (self.n_layers * self.dim + self.vocab_size * (2 if lookup_table else 1))


class Tiny(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(nn.Linear(config.dim, config.dim, bias=False) for _ in range(config.n_layers))
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def init_weights(self, seed=None, parts=None):
        init_parameters(self, self.config.n_layers, seed, parts)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


longest = lambda config: config.most
FAMILIES.append(Family("tiny", TinyConfig, Tiny, lambda config: {}, ("vocab_size",), longest=longest))

from stepgraph import cli
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig

sizes = {"seq_len": 32, "batch_size": 2, "steps": 3, "warmup_steps": 1, "val_batches": 1, "inductor": "off"}
PRESETS["tiny"] = lambda: TrainConfig(preset="tiny", model=TinyConfig(), device="cpu", **sizes)
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(words)
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


REFUSED = {
    "--seq-len 64": "seq_len=64 exceeds model.max_seq_len=32: try --seq-len 32",
    "--mesh tp=3 --seq-len 30": "tp=3 does not divide vocab_size=320",
    "--export-hf out": "export_hf works for Llama 3, DeepSeek-V3, Qwen3-MoE, transformers models only",
    "--model.dims 3": "unknown option --model.dims: did you mean --model.dim?",
}


@pytest.mark.slow
def test_another_family_trains_is_forecast_and_is_validated(tmp_path):
    commands = [
        "train tiny --out run --model.dim 24",
        "train --resume run --steps 4",
        "plan tiny --mesh fsdp=4 --model.dim 24",
        *(f"train tiny {words}" for words in REFUSED),
    ]
    (tmp_path / "tiny.py").write_text(SCRIPT)
    words = [sys.executable, "tiny.py", json.dumps([command.split() for command in commands])]
    environment = os.environ | {"PYTHONPATH": str(Path(stepgraph.__file__).parents[1])}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trained, resumed, forecast, *refused = map(json.loads, done.stdout.splitlines())
    assert trained[0] == resumed[0] == forecast[0] == 0, (trained, resumed, forecast)
    assert '"family": "tiny"' in (tmp_path / "run" / "config.json").read_text()
    assert "step 4/4" in resumed[1] and "tiny on 4 x H200" in forecast[1]
    for (status, _, error), message in zip(refused, REFUSED.values(), strict=True):
        assert status == 2 and message in error, error


def test_every_family_is_found_by_its_name_and_its_configuration():
    for family in FAMILIES:
        assert isinstance(family, Family) and family_named(family.name) is family
        assert set(family.tp_sizes) <= {*family.config.__dataclass_fields__}
    assert family_of(GolfConfig()).name == "golf"
    with pytest.raises(
        ValueError, match=r"dict is not the configuration of a model: use one of Llama3Config, GolfConfig"
    ):
        family_of({})
