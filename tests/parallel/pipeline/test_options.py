"""Options of a run that no pipeline can have are refused in one line, with what would work."""

import dataclasses
from pathlib import Path

import pytest

from stepgraph.config.presets import PRESETS

ONE_BLOCK = dataclasses.replace(PRESETS["llama3-debug"]().model, n_layers=1)
GOOD = {"mesh": "pp=2", "accumulate": 4}


def config(**options):
    return dataclasses.replace(PRESETS["llama3-debug"](), **options)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"accumulate": 1}, r"accumulate=1 is too small .* 1f1b .*--accumulate 2"),
        ({"accumulate": 3, "pipeline": "dualpipev"}, r"accumulate=3 is too small .*--accumulate 4"),
        ({"accumulate": 5, "pipeline": "interleaved"}, r"does not divide into rounds .*--accumulate 6"),
        ({"pipeline": "gpipe"}, r"unknown pipeline 'gpipe'"),
        ({"split": "0,9"}, r"split=0,9 does not fit 4 blocks"),
        ({"split": "0,1,2"}, r"split=0,1,2 has 3 stages and the schedule 1f1b on pp=2 has 2"),
        ({"split": "0"}, r"split=0 has 1 stage and the schedule 1f1b on pp=2 has 2"),
        ({"mesh": "pp=8", "accumulate": 8}, r"has 4 blocks and the schedule 1f1b on pp=8 has 8 stages: try pp=4$"),
        ({"mesh": "pp=3", "pipeline": "zbv"}, r"4 blocks .* pp=3 has 6 stages: try 1f1b, which .* or pp=2$"),
        ({"mesh": "pp=4", "pipeline": "zbv"}, r"4 blocks .* pp=4 has 8 stages: try 1f1b, which .* or pp=2$"),
        ({"model": ONE_BLOCK}, r"the model has 1 block and the schedule 1f1b on pp=2 has 2 stages: drop pp from the"),
        ({"split": "0;2"}, r"split=0;2 must be the first block of each stage"),
        ({"verify": True}, r"verify compares with eager.*drop pp"),
        ({"export_hf": Path("there")}, r"export_hf writes whole models"),
        ({"mesh": "fsdp=2", "pipeline": "1f1b"}, r"pipeline=1f1b needs pipeline stages.* add pp=2"),
        ({"mesh": None, "split": "0,2"}, r"split=0,2 needs pipeline stages.* add pp=2"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, problem):
    config(**GOOD).validate()
    with pytest.raises(ValueError, match=problem) as error:
        config(**GOOD | options).validate()
    assert "\n" not in str(error.value)
