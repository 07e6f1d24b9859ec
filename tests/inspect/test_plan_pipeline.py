"""The forecast of a pipeline: stages against their model, schedules against each other."""

import dataclasses
import json

import pytest
import torch.distributed as dist

from stepgraph import cli
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS
from stepgraph.inspect.forecast import pipeline
from stepgraph.inspect.forecast.forecast import with_microbatches
from stepgraph.inspect.forecast.pipeline import forecast_pipeline
from stepgraph.parallel import MeshSpec
from stepgraph.parallel.pipeline import SCHEDULES, check_schedule
from tests.distributed.ranks import TINY

FOUR = dataclasses.replace(TINY, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256, n_layers=4)
SEQ = 1024  # so long that communication takes little of the time
FOUR = dataclasses.replace(FOUR, max_seq_len=SEQ)


@pytest.fixture(scope="module")
def planned():
    settings = {"precision": "bf16", "batch_size": 2, "seq_len": SEQ, "inductor": "off", "accumulate": 4}
    return forecast_pipeline(TrainConfig(preset="four", model=FOUR, mesh="pp=2,fsdp=2", **settings), GPUS["h200"])


def test_every_schedule_that_fits_is_there(planned):
    assert set(planned.schedules) == {"1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"}
    assert not planned.refused and not dist.is_initialized()
    assert planned.best.step_s == min(found.step_s for found in planned.schedules.values())


def test_stages_hold_the_model(planned):
    for found in planned.schedules.values():
        blocks = [block for stage in found.stages for block in range(*stage.blocks)]
        assert blocks == [0, 1, 2, 3]
        # fp32 shards of two ranks: parameters, their gradients and two moments; over the step, parameters gathered in
        # bf16, and their whole gradients in fp32.
        rotary = 2 * SEQ * (64 // 8) * 4  # tables of every stage, fp32
        state = FOUR.num_params() * (16 // 2 + 2 + 4) + rotary * len(found.stages)
        assert sum(stage.state for stage in found.stages) == pytest.approx(state, rel=0.02)
        assert all({"gather", "reduce"} < stage.seconds.keys() for stage in found.stages)
        messages = [stage.message for stage in found.stages]
        assert messages == [2 * SEQ * 64 * 2] * (len(messages) - 1) + [0]  # the residual stream in bf16


def test_microbatches_in_flight_cost_memory(planned):
    found = planned.schedules["1f1b"]
    first, last = found.stages
    assert found.time.most_in_flight(0) == 2 and found.time.most_in_flight(1) == 1
    assert found.ranks[0] >= first.state + 2 * first.kept
    assert found.ranks[1] >= last.state + last.kept
    assert min(stage.kept for stage in found.stages) > 0


def test_messages_over_symmetric_memory_have_places(planned):
    found = forecast_pipeline(dataclasses.replace(planned.config, stage_sends="symmetric"), GPUS["h200"])
    for name, places in {"1f1b": 2, "interleaved": 5}.items():  # on the rank that needs most
        plain, symmetric = planned.schedules[name], found.schedules[name]
        assert symmetric.step_s == plain.step_s
        more = {a - b for a, b in zip(symmetric.ranks, plain.ranks, strict=True)}
        assert more == {places * plain.stages[0].message}, name
    with pytest.raises(ValueError, match=r"^stage_sends=symmetric works within a machine, .* mesh=fsdp=8,pp=2 needs"):
        forecast_pipeline(dataclasses.replace(found.config, mesh="pp=2,fsdp=8"), GPUS["h200"])


def test_what_is_kept_between_the_halves_of_backward_costs_memory(planned):
    """Each linear layer keeps its input and the gradient of its output until the second half: at least these."""
    first, last = planned.schedules["zero-bubble"].stages
    block = 64 + 64 + 64 + 128 + 2 * (64 + 2 * 32) + 2 * 128  # inputs of q/k/v, o, gate/up, down; gradients of outputs
    assert first.between >= 2 * 2 * SEQ * 2 * block  # two blocks, two sequences, bf16
    assert first.kept != first.between != last.between
    for name, found in planned.schedules.items():
        busiest = max(found.ranks)
        roomy = [dataclasses.replace(stage, between=stage.between + 2**30) for stage in found.stages]
        more = max(pipeline._peak([i], roomy, found.time) for i in range(len(roomy)))
        assert (more > busiest) == SCHEDULES[name].halves, name


def test_parameters_are_gathered_again_where_they_do_not_fit(monkeypatch):
    monkeypatch.setattr(pipeline, "SCHEDULES", {"1f1b": SCHEDULES["1f1b"]})  # one is enough here
    settings = {"precision": "bf16", "batch_size": 2, "seq_len": 32, "inductor": "off", "accumulate": 16}
    config = TrainConfig(preset="four", model=FOUR, mesh="pp=2,fsdp=2", memory="full", **settings)

    def first_stage(gib):
        gpu = dataclasses.replace(GPUS["h200"], memory=gib * 2**30)
        return forecast_pipeline(config, gpu).schedules["1f1b"].stages[0]

    roomy, tight = first_stage(141), first_stage(2**-20)
    blocks = 2 * 2 * 32 * 64 * 2  # the inputs of two blocks in bf16; all else is computed again
    assert min(roomy.kept, tight.kept) >= blocks
    assert {"gather", "reduce"} < roomy.seconds.keys() and not {"gather", "reduce"} & tight.seconds.keys()
    # The last block keeps what it gathered, once for each microbatch; with room all blocks do, once for all of them.
    block = FOUR.num_params() - dataclasses.replace(FOUR, n_layers=3).num_params()
    assert roomy.kept == pytest.approx(tight.kept - 2 * block, rel=0.1)
    assert roomy.state - tight.state > 2 * block * (2 + 4)  # in bf16, and whole gradients in fp32


def test_the_command_and_its_json(tmp_path, capsys):
    words = ["plan", "llama3-debug", "--mesh", "pp=2,fsdp=2", "--gpu", "h100", "--inductor", "off", "--seq-len", "32"]
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--accumulate", "2", "--pipeline", "zbv", "--json", str(tmp_path / "plan.json")])
    printed = capsys.readouterr().out
    assert "stages of zbv" in printed and "between halves" in printed and "best: --pipeline" in printed
    assert "dualpipev is left out: accumulate=2 is too small" in printed
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["chosen"] == "zbv" and found["settings"]["accumulate"] == 2
    spans = found["schedules"]["zbv"]["spans"]
    assert max(end for *_, end in spans) == pytest.approx(
        found["schedules"]["zbv"]["step_s"] - found["schedules"]["zbv"]["update_s"]
    )


@pytest.mark.parametrize(
    ("given", "mesh", "preset", "expected"),
    [(3, "pp=8", 1, 3), (None, None, 1, 1), (None, "fsdp=8", 4, 4), (None, "pp=8", 8, 8), (None, "pp=8,tp=2", 7, 16)],
)
def test_without_a_number_there_are_microbatches_for_every_schedule(given, mesh, preset, expected):
    words = [] if given is None else ["--accumulate", str(given)]
    config = TrainConfig(accumulate=given or preset, mesh=mesh)
    assert with_microbatches(config, words).accumulate == expected
    if mesh is not None and given is None and expected != preset:
        for name in SCHEDULES:
            check_schedule(name, MeshSpec.parse(mesh).pp, expected)


def test_a_pipeline_without_pp_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "llama3-debug", "--mesh", "fsdp=2", "--pipeline", "zbv"])
    assert "add pp=2 to --mesh" in capsys.readouterr().err
