"""The forecast against numbers made by hand: bytes, FLOPs, and the cost of a collective."""

import dataclasses
import json
from collections import Counter

import pytest
import torch.distributed as dist
from rich.console import Console

from stepgraph import cli
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS
from stepgraph.inspect.forecast.command import show
from stepgraph.inspect.forecast.forecast import forecast, model_flops
from stepgraph.inspect.forecast.tables import new_console, new_table
from stepgraph.models.decoder import SwiGLU
from stepgraph.regions import region
from tests.distributed.ranks import TINY

# Every dimension divides over four shards of two tp ranks, so nothing is padded.
EVEN = dataclasses.replace(TINY, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256, n_layers=2)
B, T = 2, 32
#: Without these, collectives are where the model's reads put them: numbers that a hand can make.
OVER_COLLECTIVES = ["dedupe_unshards", "reshard_after_forward", "bucket_collectives", "bucket_all_reduces", "overlap"]


def config(mesh, **options):
    settings = {"model": EVEN, "precision": "bf16", "batch_size": B, "seq_len": T, "inductor": "off"} | options
    return TrainConfig(preset="even", mesh=mesh, steps=20, **settings)


@pytest.fixture(scope="module")
def sharded():
    return forecast(config("fsdp=4", disable_pass=OVER_COLLECTIVES), GPUS["h200"])


def counted(result):
    """(kind, axis, phase) -> (collectives, bytes)."""
    counts, sizes = Counter(), Counter()
    for c in result.timeline.collectives:
        counts[c.kind, c.axis, c.phase] += 1
        sizes[c.kind, c.axis, c.phase] += c.bytes
    return {key: (counts[key], sizes[key]) for key in counts}


def test_fsdp_gathers_and_reduces_every_parameter_once(sharded):
    params, tensors = EVEN.num_params(), 2 * 9 + 3
    found = counted(sharded)
    assert found["all_gather", "dp_shard", "forward"] == (tensors, 2 * params)  # bf16
    assert found["reduce_scatter", "dp_shard", "backward"] == (tensors, 4 * params)  # fp32
    assert {kind for kind, _, phase in found if phase in ("forward", "backward")} == {"all_gather", "reduce_scatter"}
    paths = {c.path for c in sharded.timeline.collectives if c.kind == "all_gather"}
    assert {"embed", "layers.0.attn.q_proj", "layers.1.mlp.down_proj", "norm", "head"} <= paths


def test_state_is_a_share_of_the_model(sharded):
    params = EVEN.num_params()
    for moment in sharded.moments:
        assert moment.bytes["parameters"] == 4 * params // 4
        assert moment.bytes["optimizer"] == 2 * 4 * params // 4 + 4 * (2 * 9 + 3)  # two moments and the step counts
    update = next(m for m in sharded.moments if m.phase == "optimizer")
    assert update.bytes["gradients"] == 4 * params // 4
    assert update.bytes["activations"] == update.bytes["buckets"] == 0


def test_gathered_parameters_stay_for_backward(sharded):
    # The norms' gathered weights are read in backward as well; the table is not, a lookup's backward has no use for it.
    forward = [m for m in sharded.moments if m.phase in ("forward", "loss")][-1]
    table = EVEN.vocab_size * EVEN.dim
    assert forward.bytes["buckets"] == 2 * (EVEN.num_params() - table)


def test_products_are_the_models_flops(sharded):
    # Palm's count has full scores, and twice the forward's for backward; flash attention runs half of them, and five
    # products in backward.
    tokens = B * T
    dense = 6 * EVEN.num_params(lookup_table=False) * tokens
    norms = 6 * (2 * EVEN.n_layers + 1) * EVEN.dim * tokens  # counted by the formula, no matrix products
    scores = EVEN.n_layers * (2 + 5) * (2 * T * T * EVEN.dim) * B // 2
    assert sharded.flops == dense - norms + scores
    assert model_flops(sharded.config) == dense + 12 * EVEN.n_layers * EVEN.dim * T * tokens


def test_tensor_parallelism_divides_products_and_state():
    whole, split = forecast(config("fsdp=2"), GPUS["h200"]), forecast(config("fsdp=2,tp=2"), GPUS["h200"])
    assert split.flops * 2 == whole.flops
    assert model_flops(split.config) * 2 == model_flops(whole.config)
    found = counted(split)
    stream, blocks = 2 * B * T * EVEN.dim, 2 * EVEN.n_layers
    # Every block half gathers once and scatters once; the embedding scatters and the last norm gathers.
    assert found["all_gather", "tp", "forward"] == found["reduce_scatter", "tp", "forward"]
    assert found["all_gather", "tp", "forward"] == (blocks + 1, (blocks + 1) * stream)
    matrices = EVEN.num_params() - (2 * EVEN.n_layers + 1) * EVEN.dim
    assert split.peak.bytes["parameters"] == 4 * (matrices // 4 + (EVEN.num_params() - matrices) // 2)


def test_products_in_a_pipeline_expose_copies_and_barriers():
    sizes = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}
    model = dataclasses.replace(EVEN, **sizes, vocab_size=65536, max_seq_len=8192)
    options = {"model": model, "batch_size": 1, "seq_len": 8192}
    plain, joined = (forecast(config("fsdp=2,tp=2", async_tp=on, **options), GPUS["h200"]) for on in (False, True))
    assert joined.flops == plain.flops
    exposed = [sum(c.exposed_seconds for c in r.timeline.collectives if c.axis == "tp") for r in (joined, plain)]
    assert exposed[0] < 0.6 * exposed[1]
    before, after = counted(plain), counted(joined)
    blocks, stream = 2 * model.n_layers, 2 * 8192 * model.dim
    assert before["all_gather", "tp", "forward"] == (blocks + 1, (blocks + 1) * stream)
    assert after["all_gather + mm", "tp", "forward"] == (blocks + 1, (blocks + 1) * stream)
    assert after["mm + reduce_scatter", "tp", "forward"] == (blocks, blocks * stream)
    assert after["reduce_scatter", "tp", "forward"] == (1, stream)  # the embedding's
    assert after["all_gather + mm", "tp", "backward"] == (blocks, blocks * stream)
    assert after["mm + reduce_scatter", "tp", "backward"] == (blocks + 1, (blocks + 1) * stream)
    # Before gate and up: a flag travels once, a kernel waits for it, and each product is two; the other half, copied
    # next to them, travels for a tenth of the products' time.
    gather = next(c for c in joined.timeline.collectives if c.kind == "all_gather + mm" and c.path == "layers.0.mlp")
    expected = 5e-6 + 3 * 4e-6
    assert gather.exposed_seconds == pytest.approx(expected)
    assert gather.seconds == pytest.approx(stream / 2 / 450e9)


def test_copy_engines_move_what_collectives_moved():
    sizes = {"dim": 1024, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 4096, "vocab_size": 4096, "max_seq_len": 2048}
    options = {"model": dataclasses.replace(EVEN, **sizes), "seq_len": 2048, "reduce_dtype": "bf16", "inductor": "full"}
    plain, copied = (forecast(config("fsdp=4", copy_engines=on, **options), GPUS["h200"]) for on in (False, True))
    before, after = counted(plain), counted(copied)
    for kind, phase in (("all_gather", "forward"), ("reduce_scatter", "backward")):
        name, axis = f"{kind} by copies", "dp_shard"
        assert after[name, axis, phase] == before[kind, axis, phase] and (kind, axis, phase) not in after
    travel = 3 * next(c for c in copied.timeline.collectives if c.kind == "all_gather by copies").bytes / 4
    assert copied.timeline.collectives[0].seconds == pytest.approx(20e-6 + travel / 450e9)
    assert copied.timeline.collectives[0].dtype == "bfloat16"
    assert copied.flops == plain.flops
    assert copied.peak.total == pytest.approx(plain.peak.total, rel=0.02)
    assert copied.timeline.compute_seconds == pytest.approx(plain.timeline.compute_seconds, rel=0.1)
    apart = forecast(config("fsdp=16", copy_engines=True, **options), GPUS["h200"])  # two machines
    kinds = {kind for kind, axis, _ in counted(apart) if axis == "dp_shard"}
    assert {"all_gather", "reduce_scatter"} < kinds and not any("copies" in kind for kind in kinds)


def test_replicas_reduce_their_shards():
    found = counted(forecast(config("hsdp=2x2", disable_pass=OVER_COLLECTIVES), GPUS["h200"]))
    assert found["all_reduce", "dp_replicate", "backward"] == (2 * 9 + 3, 4 * EVEN.num_params() // 2)


def test_recomputation_trades_memory_for_flops(sharded):
    again = forecast(config("fsdp=4", memory="full"), GPUS["h200"])
    assert again.flops > sharded.flops and model_flops(again.config) == model_flops(sharded.config)
    left = [max(m.bytes["activations"] for m in r.moments) for r in (sharded, again)]
    assert left[1] < left[0] / 2


def test_a_loss_that_backward_computes_again(sharded):
    again = forecast(config("fsdp=4", memory="selective"), GPUS["h200"])
    assert again.flops == sharded.flops  # products are kept
    assert again.peak.total <= sharded.peak.total


def test_fused_kernels_move_and_keep_less(sharded):
    fused = forecast(config("fsdp=4", inductor="full", disable_pass=OVER_COLLECTIVES), GPUS["h200"])
    assert fused.timeline.compute_seconds < 0.9 * sharded.timeline.compute_seconds
    assert fused.peak.total < sharded.peak.total
    assert fused.flops == sharded.flops


def test_nothing_overlaps_where_the_wait_follows(sharded):
    timeline = sharded.timeline
    assert timeline.exposed_seconds == pytest.approx(sum(c.seconds for c in timeline.collectives))
    assert timeline.step_seconds == pytest.approx(timeline.compute_seconds + timeline.exposed_seconds)
    assert sharded.overlapped_seconds < timeline.step_seconds


def test_buckets_and_overlap_are_in_the_forecast(sharded):
    """The same bytes in fewer collectives, which wait for less."""
    result = forecast(config("fsdp=4"), GPUS["h200"])
    before, after = counted(sharded), counted(result)
    for key in (("all_gather", "dp_shard", "forward"), ("reduce_scatter", "dp_shard", "backward")):
        assert after[key][0] < before[key][0] / 4 and after[key][1] == before[key][1]
    assert result.timeline.exposed_seconds < sharded.timeline.exposed_seconds / 2


def test_thousands_of_ranks_are_one_graph(sharded):
    many = forecast(config("hsdp=64x4"), GPUS["b200"])
    assert many.flops == sharded.flops and many.config.mesh_spec.size == 256
    assert not dist.is_initialized()


def test_one_gpu_needs_no_mesh(capsys):
    alone = forecast(config(None), GPUS["h200"])
    assert alone.to_json()["mesh"] == "" and alone.to_json()["ranks"] == 1
    show(alone, Console(width=200))
    shown = capsys.readouterr().out
    assert "even on 1 x H200 SXM, 1 microbatch" in shown and "to spare" in shown
    assert " tokens/s, MFU " in shown and not any(word in shown for word in ("collectives", "communication", "buckets"))


def test_time_is_summed_by_region(monkeypatch, capsys):
    plain = SwiGLU.forward

    def named(self, x):
        with region("mlp"):
            return plain(self, x)

    monkeypatch.setattr(SwiGLU, "forward", named)
    result = forecast(config("fsdp=4"), GPUS["h200"])
    timeline = result.timeline
    assert timeline.regions.keys() == {
        *(("mlp", phase) for phase in ("forward", "backward")),
        *(("", phase) for phase in ("forward", "loss", "backward", "optimizer")),
    }
    assert sum(timeline.regions.values()) == pytest.approx(timeline.compute_seconds)
    assert sum(r["compute_s"] for r in result.to_json()["regions"]) == pytest.approx(timeline.compute_seconds)
    assert timeline.regions["mlp", "backward"] > timeline.regions["mlp", "forward"]
    show(result, Console(width=200))
    shown = capsys.readouterr().out
    assert "time per rank by region" in shown and "elsewhere" in shown


def test_a_table_in_a_pipe_is_as_wide_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    table = new_table("widths", ["collective", "role"], ["bytes"])
    table.add_row("reduce_scatter of parameters", "recomputation " * 5, "2,147,483,648.00 GiB")
    new_console().print(table)
    shown = capsys.readouterr().out
    assert "…" not in shown and len(shown.splitlines()) == 6
    assert all(word in shown for word in ("reduce_scatter of parameters", "recomputation " * 5, "2,147,483,648.00 GiB"))


def test_the_command(tmp_path, capsys):
    file = tmp_path / "plan.json"
    with pytest.raises(SystemExit) as stop:
        words = "plan llama3-debug --mesh fsdp=4 --gpu H200 --seq-len 64 --model.n-layers 2"
        cli.main([*words.split(), "--json", str(file)])
    assert stop.value.code == 0
    shown, written = capsys.readouterr().out, json.loads(file.read_text())
    assert written["time_over_peak"] is None and written["offload"] == []
    assert "llama3-debug on 4 x H200 SXM (fsdp=4)" in shown and "dp_shard" in shown and "to spare" in shown
    assert written["ranks"] == 4 and written["settings"]["seq_len"] == 64 and written["model"]["n_layers"] == 2
    assert written["peak_bytes"] == max(moment["total"] for moment in written["memory"])
    assert written["exposed_s"] == pytest.approx(sum(c["exposed_seconds"] for c in written["collectives"]))
    assert 0 < written["mfu"] < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "plan takes its preset first: write stepgraph plan llama3-8b --mesh fsdp=4,tp=2 --gpu h100"),
        ("llama3-8c --mesh fsdp=2", "unknown preset 'llama3-8c': did you mean 'llama3-8b'?"),
        ("llama3-8b --mesh fsdp=2 --gpu a100", "--gpu: 'a100' is not one of h100, h200, b200"),
        ("llama3-8b --mesh fsdp=2 --json no/x.json", "json=no/x.json: the folder no does not exist; make it first"),
        ("llama3-8b --mesh fdsp=2", "unknown mesh axis 'fdsp': did you mean 'fsdp'?"),
        ("llama3-8b --mesh tp=16", "tp=16 does not divide n_kv_heads=8; try tp=8"),
        ("llama3-8b --mesh fsdp=2 --memry full", "unknown option --memry: did you mean --memory?"),
        ("llama3-8b --mesh fsdp=2 --model.n-layer 2", "unknown option --model.n-layer: did you mean --model.n-layers?"),
        ("llama3-8b --mesh fsdp=2 --batch-size 0", "batch_size=0 must be above 0"),
        ("llama3-8b --mesh fsdp=2 --cuda-graph", "cuda_graph=True changes nothing in a forecast: leave it out"),
    ],
)
def test_errors_of_use_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *words.split()])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"
