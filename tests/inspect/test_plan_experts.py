"""The forecast of experts spread over ranks, against numbers made by hand."""

import dataclasses

import pytest
import torch
from rich.console import Console

from stepgraph import cli
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS, GROUPED_REACHED
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.forecast.command import show, show_pipeline
from stepgraph.inspect.forecast.forecast import forecast
from stepgraph.inspect.forecast.pipeline import forecast_pipeline, simulated_stage
from tests.models.moe_models import DEEPSEEK

#: One layer with experts, 16 of which a token chooses 2, on 4 ranks with 4 each.
EXPERTS, CHOSEN, RANKS, DIM, HIDDEN, B, T = 16, 2, 4, 1024, 2048, 2, 4096
MOE = dataclasses.replace(DEEPSEEK.moe, n_experts=EXPERTS, top_k=CHOSEN, ffn_dim=HIDDEN)
MODEL = dataclasses.replace(DEEPSEEK, dim=DIM, n_layers=2, moe=MOE, max_seq_len=T)


def config(**options):
    settings = {"mesh": "fsdp=8,ep=4", "precision": "bf16", "batch_size": B, "seq_len": T, "inductor": "off"}
    return TrainConfig(preset="experts", model=MODEL, steps=20, **settings | options)


@pytest.fixture(scope="module")
def balanced():
    return forecast(config(), GPUS["h200"])


def exchanged(result, kind, phase, dtype="bfloat16"):
    return [c for c in result.timeline.collectives if (c.role, c.phase, c.dtype) == (kind, phase, dtype)]


def test_rows_travel_there_and_back(balanced):
    parts = 2 * DIM * 2 * B * T * CHOSEN  # bf16, room for twice the balanced load
    for kind in ("dispatch", "combine"):
        for phase in ("forward", "backward"):
            (collective,) = exchanged(balanced, kind, phase)
            assert (collective.axis, collective.ranks, collective.bytes) == ("ep", RANKS, parts)
    (counts,) = exchanged(balanced, "dispatch", "forward", "int32")
    assert counts.bytes == 4 * EXPERTS


def test_over_symmetric_memory_only_rows_that_exist_travel(balanced):
    result = forecast(config(expert_exchange="symmetric"), GPUS["h200"])
    loaded = forecast(config(expert_exchange="symmetric"), GPUS["h200"], imbalance=2.0)
    rows = 2 * DIM * B * T * CHOSEN  # bf16, one for each slot of a token
    for kind in ("dispatch", "combine"):
        for phase in ("forward", "backward"):
            (collective,), (most,) = (exchanged(r, kind, phase) for r in (result, loaded))
            assert collective.kind == "all_to_all of rows" and (collective.axis, collective.ranks) == ("ep", RANKS)
            assert (collective.bytes, most.bytes) == (rows, 2 * rows)
            assert 1.5 * collective.seconds < most.seconds < 2 * collective.seconds  # latencies stay
    (counts,) = exchanged(result, "dispatch", "forward", "int32")
    assert counts.kind == "all_gather of counts" and counts.bytes == 4 * EXPERTS * RANKS
    assert loaded.config.expert_capacity == 2.0  # twice the mean has room
    assert result.peak.total == loaded.peak.total < balanced.peak.total
    # Of the same rows in the same room: the experts' products take as long.
    assert result.flops == balanced.flops


def test_a_rank_holds_its_experts(balanced):
    experts = 3 * EXPERTS * DIM * HIDDEN
    (gather,) = [c for c in balanced.timeline.collectives if (c.axis, c.phase) == ("ep_shard", "forward")]
    assert gather.bytes == 2 * experts // RANKS  # bf16, two ranks share what each of ep has
    assert balanced.imbalance == 1 and balanced.to_json()["imbalance"] == 1


def test_imbalance_takes_room_and_time(balanced):
    loaded = forecast(config(), GPUS["h200"], imbalance=3.0)
    assert loaded.config.expert_capacity == 4.0  # 2.0 doubled, as a step that does not fit makes it
    (before,), (after,) = (exchanged(result, "combine", "forward") for result in (balanced, loaded))
    assert after.bytes == 2 * before.bytes and after.seconds > before.seconds
    assert loaded.peak.total > balanced.peak.total
    roomy = forecast(config(expert_capacity=4.0), GPUS["h200"])
    assert roomy.peak.total == loaded.peak.total  # imbalance is rows in the same room
    busy, idle = (result.timeline.regions["compute", "forward"] for result in (loaded, roomy))
    assert 1.5 * idle < busy < 3 * idle  # products of three times the rows; what moves memory moves all of the room


@pytest.fixture(scope="module")
def stages():
    """The stages of 1F1B by imbalance and capacity: a dense layer in the first, one with experts in the second."""

    def of(imbalance, **options):
        found = forecast_pipeline(
            config(mesh="pp=2,fsdp=4,ep=4", accumulate=2, batch_size=1, passes="exact", **options),
            GPUS["h200"],
            imbalance,
        )
        assert found.imbalance == found.to_json()["imbalance"] == imbalance
        return found, found.schedules["1f1b"].stages

    return {"balanced": of(1.0), "loaded": of(3.0), "roomy": of(1.0, expert_capacity=4.0)}


def test_imbalance_takes_room_and_time_of_the_stages_with_experts(stages):
    (_, balanced), (loaded, busy), (_, roomy) = (stages[name] for name in ("balanced", "loaded", "roomy"))
    assert loaded.config.expert_capacity == 4.0
    dense, experts = 0, 1
    assert busy[dense] == roomy[dense] and busy[dense].seconds == balanced[dense].seconds
    assert roomy[experts].working == busy[experts].working > balanced[experts].working  # imbalance is rows in a room
    assert roomy[experts].kept == busy[experts].kept > balanced[experts].kept
    for kind in ("forward", "backward_input", "backward_weight"):
        # More room takes time to exchange and move, more rows in the same room take the experts' products.
        assert busy[experts].seconds[kind] > roomy[experts].seconds[kind]
    assert roomy[experts].seconds["forward"] > balanced[experts].seconds["forward"]
    # Three products forward, three for the gradients of rows and three of weights, each of the same FLOPs a row.
    added = 2 * 2 * T * CHOSEN * 3 * DIM * HIDDEN / GPUS["h200"].peak(torch.bfloat16) / GROUPED_REACHED
    more = {kind: s - roomy[experts].seconds[kind] for kind, s in busy[experts].seconds.items()}
    # Those rows are no zeros behind the products' results, in bf16: gate and up, and the last one; and their gradients.
    zeros = {"forward": 2 * HIDDEN + DIM, "backward": HIDDEN + DIM}
    spared = {k: GPUS["h200"].moving_seconds(2 * T * CHOSEN * 2 * width) for k, width in zeros.items()}
    assert more["forward"] == pytest.approx(added - spared["forward"], rel=0.01)
    assert more["backward"] == pytest.approx(2 * added - spared["backward"], rel=0.01)
    # All of it in the region `compute`, which the forecast of each stage tells apart.
    assert not any(region for region, _ in busy[dense].regions)
    assert busy[experts].regions["dispatch", "forward"] == roomy[experts].regions["dispatch", "forward"] > 0
    for phase, times in (("forward", 1), ("backward", 2)):
        time_s = busy[experts].regions["compute", phase] - roomy[experts].regions["compute", phase]
        assert time_s == pytest.approx(times * added - spared[phase], rel=0.01)
    show_pipeline(loaded, console := Console(width=200, record=True))
    assert "stage 1, the slowest" in console.export_text()
    rows = loaded.to_json()["schedules"]["1f1b"]["stages"][experts]["regions"]
    found = {(row["region"], row["phase"]): row["compute_s"] for row in rows}
    assert found == busy[experts].regions and {"compute", "combine", ""} < {region for region, _ in found}


def test_the_page_of_a_stage_costs_what_the_forecast_does():
    """Backward's products too, whose tokens were routed in another graph."""
    chosen = dataclasses.replace(
        config(mesh="pp=2,fsdp=4,ep=4", pipeline="zero-bubble", accumulate=2, batch_size=1, passes="exact"),
        model=dataclasses.replace(MODEL, n_dense_layers=0),
    )
    with simulated_stage(chosen, GPUS["h200"]) as (program, groups, costs):
        account = account_of(program, chosen, GPUS["h200"], groups, device=None, stages=costs)
    found = {graph["name"]: graph["step_ns"] for graph in account["graphs"]}
    for kind in ("forward", "backward_input", "backward_weight"):
        assert found[f"{kind}.0"] == pytest.approx(1e9 * costs[0].seconds[kind], rel=1e-3), kind


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mesh fsdp=8 --imbalance 2", "imbalance=2 needs experts spread over ranks: add ep=2 to --mesh"),
        ("--mesh fsdp=8,ep=4 --imbalance 0.5", "use 1 to 4, which is every row on one rank"),
        ("--mesh fsdp=8,ep=4 --imbalance 5", "use 1 to 4, which is every row on one rank"),
        ("--mesh fsdp=8,ep=3", "ep=3 does not divide its 8 ranks of shards and tp"),
        ("--mesh fsdp=8 --expert-chunks auto", "expert_chunks=auto needs expert parallelism"),
        ("--mesh fsdp=8,ep=2 --expert-chunks 0", "expert_chunks=0 must be above 0, or auto"),
        ("--mesh fsdp=8 --expert-chunks 2", "expert_chunks=2 needs expert parallelism"),
        ("--mesh fsdp=8 --expert-exchange symmetric", "expert_exchange=symmetric needs expert parallelism"),
        ("--mesh fsdp=16,ep=16 --expert-exchange symmetric", "works within a machine, of 8 GPUs, and ep=16 needs"),
        ("--mesh pp=2,fsdp=2 --accumulate 2 --imbalance 2", "imbalance=2 needs experts spread over ranks"),
        ("--mesh pp=2,fsdp=2,ep=2 --accumulate 2 --imbalance 3", "use 1 to 2, which is every row on one rank"),
    ],
)
def test_errors_of_use_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "deepseek-v3-debug", *words.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


def test_what_is_shown(balanced, capsys):
    show(balanced, Console(width=200))
    shown = capsys.readouterr().out
    assert "the most loaded rank at 1 times the mean" in shown and "0.0B of them active per token" in shown
    assert "ep x 4" in shown and "combine" in shown
