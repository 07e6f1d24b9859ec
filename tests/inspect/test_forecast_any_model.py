"""`stepgraph.forecast`: any model's step on a GPU that is not there, next to the plan's and to what torch allocates."""

import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import stepgraph
from stepgraph import compat
from stepgraph.config import build
from stepgraph.config.presets import PRESETS
from stepgraph.costs.hardware import GPUS
from stepgraph.costs.memory import peak_bytes
from stepgraph.costs.step import graph_cost, step_cost
from stepgraph.inspect.forecast.forecast import simulated
from stepgraph.lower import StepSpec, lower
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions, Target

OFF = stepgraph.StepOptions(inductor="off")


@pytest.fixture
def given_batch(monkeypatch):
    """Forecasts of the batch that is given alone: the search for the largest one traces six others."""
    monkeypatch.setattr("stepgraph.inspect.forecast.any_model._largest_batch", lambda *_: (None, "not searched"))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Tower(nn.Module):
    """Blocks whose activations are most of a step."""

    def __init__(self, width=64, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def tower_loss(model, batch):
    return model(batch["x"]).square().mean()


def tower_step(rows=32, width=64, **options):
    model = Tower(width)
    return model, tower_loss, {"x": torch.randn(rows, 16, width)}, torch.optim.AdamW(model.parameters(), **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_presets_model_given_by_hand_has_the_plans_forecast(accumulate, given_batch):
    preset = PRESETS["llama3-debug"]()
    shape = dataclasses.replace(preset.model, n_layers=2)
    config = dataclasses.replace(preset, model=shape, mesh=None, device="cpu", accumulate=accumulate, batch_size=2)
    with simulated(config, GPUS["h200"]) as (program, _):
        calls = [(graph_cost(g, GPUS["h200"], {}, fused=config.compiles_all), n) for g, n in program.counted()]
        planned = step_cost(calls)
    device = torch.device("cpu")
    model = build.empty_model(config, device)
    optimizer = build.build_optimizer(config, model)
    found = stepgraph.forecast(
        *(model, build.build_loss(config, device), build.example_batch(config, device), optimizer),
        device="h200",
        passes=config,  # the options of a step among others
        max_grad_norm=config.max_grad_norm,
        accumulate=accumulate,
    )
    peak = max(planned.moments, key=lambda moment: moment.total)
    assert (found.peak_bytes, found.by_kind, found.peak_phase) == (peak.total, peak.bytes, peak.phase)
    assert found.step_s == planned.timeline.step_seconds
    assert sum(held.bytes for held in found.largest) == found.peak_bytes
    assert not optimizer.state


def test_what_fills_the_memory_is_the_peak_with_state_on_the_host_and_workspaces(given_batch):
    """State of the optimizer on the host is not listed; the workspace of an attention is."""
    config = Llama3Config(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=64, max_seq_len=8192)
    with torch.device("meta"):
        model = Llama3(config).to(torch.bfloat16)
    ids = torch.zeros(2, 8192, dtype=torch.int64, device="meta")
    options = StepOptions(memory="full", tiles=8, offload_optimizer=True)
    optimizer = stepgraph.MasterAdamW(model.parameters(), lr=1e-4)
    batch = {"tokens": ids, "targets": ids}
    found = stepgraph.forecast(model, next_token_loss, batch, optimizer, device="h200", passes=options)
    assert sum(held.bytes for held in found.largest) == found.peak_bytes
    assert not [held for held in found.largest if held.kind == "optimizer" and held.bytes > 1024]
    assert [held for held in found.largest if held.what.startswith("results and workspace of")]


def test_policies_come_in_order_and_the_chosen_one_is_the_forecast(given_batch):
    model, *rest = tower_step(rows=512)
    found = stepgraph.forecast(model, *rest, passes=dataclasses.replace(OFF, memory="full"))
    assert [policy.memory for policy in found.policies] == ["none", "selective", "full"]
    none, _, full = found.policies
    assert none.peak_bytes > full.peak_bytes == found.peak_bytes and none.step_s < full.step_s == found.step_s
    assert found.memory == "full" and found.fits and 0 < found.products_share < 1
    budget = stepgraph.forecast(model, *rest, passes=dataclasses.replace(OFF, memory="budget=0.6"))
    assert full.peak_bytes < budget.peak_bytes < none.peak_bytes and len(budget.policies) == 3


def test_nothing_of_the_users_changes():
    model, loss_fn, batch, optimizer = tower_step()
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    random = torch.get_rng_state()
    stepgraph.forecast(model, loss_fn, batch, optimizer)
    after = model.state_dict(keep_vars=True)
    assert all(id(after[name]) == was and torch.equal(after[name], value) for name, (was, value) in before.items())
    assert not any(map(compat.is_fake, after.values())) and not optimizer.state
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == held
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in model.parameters())
    loss = stepgraph.capture(model, loss_fn, batch, optimizer, passes="exact")(batch)
    assert loss.isfinite()


def test_an_optimizer_that_has_stepped_is_forecast_as_a_new_one(given_batch):
    model, loss_fn, batch, optimizer = tower_step()
    new = stepgraph.forecast(model, loss_fn, batch, optimizer)
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    assert stepgraph.forecast(model, loss_fn, batch, optimizer).by_kind == new.by_kind
    assert all(map(torch.equal, moments, (state["exp_avg"] for state in optimizer.state.values())))


def test_what_fills_the_memory_has_its_module_and_line(given_batch):
    found = stepgraph.forecast(*tower_step(rows=4096), passes=OFF)
    kept = [held for held in found.largest if held.kind == "activations"]
    assert any(held.module == "layers.*.up" and held.count == 4 for held in kept)
    assert any("test_forecast_any_model.py:" in held.source for held in kept)
    assert found.by_kind["parameters"] == 4 * 4 * (2 * 64 * 128 + 64 + 128)
    state = [held for held in found.largest if held.what == "weight exp_avg"]
    assert {(held.count, held.module, held.bytes) for held in state} == {
        (4, f"layers.*.{name}", 4 * 4 * 64 * 128) for name in ("up", "down")
    }
    text = str(found)
    assert "layers.*.up" in text and "H200" in text and len(text.splitlines()) < 40
    assert "reserves" in text  # what is not in the peak
    assert json.loads(json.dumps(found.to_json()))["peak_bytes"] == found.peak_bytes


@pytest.mark.parametrize(("rows", "accumulate"), [(8, 1), (8, 4), (4_000_000, 1)])
def test_the_largest_batch_fits_and_a_larger_one_does_not(rows, accumulate):
    model = Tower(256, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def at(rows):
        batch = {"x": torch.empty(rows, 16, 256, device="meta")}
        return stepgraph.forecast(model, tower_loss, batch, optimizer, passes=OFF, accumulate=accumulate)

    first = at(rows)
    largest = first.largest_batch
    assert first.fits == (rows <= largest) and largest % accumulate == 0
    step = accumulate * (largest // accumulate // 1000)  # a thousandth
    assert at(largest - step).fits and not at(largest + step).fits


def test_the_search_for_the_largest_batch_stops_at_few_integers(monkeypatch):
    """Labels of the 300 million rows of a small layer that an H200 holds would take minutes, and GBs of the host."""
    monkeypatch.setattr("stepgraph.inspect.forecast.any_model._MOST_INTEGERS", 2**10)
    batch = {"x": torch.randn(8, 4), "y": torch.randint(4, (8,))}
    found = stepgraph.forecast(nn.Linear(4, 4), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch, passes=OFF)
    assert found.largest_batch == 2**10 and "of 8, 1024; larger ones are not tried" in found.batch_note


def test_the_largest_batch_fits_where_memory_is_not_linear():
    """Scores of each sample with each other: lines through two batches would promise too much."""
    model = nn.Linear(64, 64)

    def loss_fn(model, batch):
        x = model(batch["x"])
        return (x @ x.t()).square().mean()

    def at(rows):
        batch = {"x": torch.empty(rows, 64, device="meta")}
        return stepgraph.forecast(model, loss_fn, batch, torch.optim.SGD(model.parameters()), passes=OFF)

    first = at(4096)
    largest = first.largest_batch
    assert f"{largest}" in first.batch_note and at(largest).fits and not at(2 * largest).fits


def test_no_batch_is_promised_for_a_peak_beyond_the_gpus():
    options = stepgraph.StepOptions("exact", memory="peak=100GiB")
    found = stepgraph.forecast(*tower_step(), device="h100", passes=options)
    assert found.fits and found.largest_batch is None and "the GPU has 74.51 GiB" in found.batch_note


@pytest.mark.parametrize(
    ("passes", "accumulate", "peak"),
    [("exact", 1, 0.1), *(pytest.param("default", *p, marks=pytest.mark.long) for p in ((1, 0.1), (2, 0.3)))],
)
def test_the_largest_batch_under_a_peak_meets_it(passes, accumulate, peak):
    """And one that is two hundredths larger does not."""
    model = Tower(128, 1)
    options = dataclasses.replace(OFF, passes=passes, memory=f"peak={peak}GiB")

    def step(rows):
        return model, tower_loss, {"x": torch.zeros(rows, 16, 128)}, torch.optim.AdamW(model.parameters())

    found = stepgraph.forecast(*step(64), passes=options, accumulate=accumulate)
    largest = found.largest_batch
    assert largest > 128 and largest % accumulate == 0 and f"{largest}" in found.batch_note
    target, own = Target.forecast(GPUS["h200"]), {"accumulate": accumulate, "passes": options}
    assert peak_bytes(lower(StepSpec(*step(largest), **own), target).program) <= peak * 2**30
    with pytest.raises(ValueError, match="cannot be met"):
        lower(StepSpec(*step((int(1.02 * largest) // accumulate + 1) * accumulate), **own), target)


def test_a_batch_without_one_size_has_no_largest():
    model, _, batch, optimizer = tower_step()
    batch |= {"weights": torch.ones(3)}

    def loss_fn(model, batch):
        return tower_loss(model, batch) * batch["weights"].sum()

    found = stepgraph.forecast(model, loss_fn, batch, optimizer)
    assert found.largest_batch is None and "3, 32" in found.batch_note and "unknown" in str(found)


def test_a_batch_size_that_the_model_refuses_is_said():
    model, _, batch, optimizer = tower_step()

    def loss_fn(model, batch):
        return model(batch["x"].view(32, -1, 64)).mean() if len(batch["x"]) == 32 else batch["x"].view(7, 7)

    found = stepgraph.forecast(model, loss_fn, batch, optimizer)
    assert found.largest_batch is None and "cannot be traced" in found.batch_note


class Recognizer(nn.Module):
    """Sounds to letters, as Wav2Vec2 has it: labels are compared and their longest is read."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(8, 2048), nn.Linear(2048, 12)

    def forward(self, x, labels):
        if labels.max() >= 12:
            raise ValueError("labels beyond the vocabulary")
        lengths, longest = (labels > 0).sum(1), int((labels > 0).sum(1).max())
        logs = self.out(self.up(x).tanh()).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, labels[:, :longest], torch.full_like(lengths, x.shape[1]), lengths)


def test_integers_of_the_batch_may_be_read():
    """They keep their values, and repeat in larger batches; a batch that the model refuses is refused."""
    batch = {"x": torch.randn(4, 400, 8), "labels": torch.randint(1, 12, (4, 6))}
    batch["labels"][1, 3:] = 0

    def loss_fn(model, batch):
        return model(**batch)

    found = stepgraph.forecast(Recognizer(), loss_fn, batch)
    assert found.batch_size == 4 and found.largest_batch > 4
    with pytest.raises(ValueError, match="beyond the vocabulary"):
        stepgraph.forecast(Recognizer(), loss_fn, batch | {"labels": batch["labels"] + 7})


def test_a_step_that_cannot_fit():
    model = Tower(64, 1)
    batch = {"x": torch.empty(1, 2**30, 64, device="meta")}
    found = stepgraph.forecast(model, tower_loss, batch, torch.optim.SGD(model.parameters()))
    assert not found.fits and found.largest_batch == 0 and "does not fit" in str(found)
    assert not any(policy.fits for policy in found.policies)


def test_autocast_for_a_gpu_counts_without_one(given_batch):
    model, _, batch, optimizer = tower_step(rows=4096)

    def under(kind):
        def loss_fn(model, batch):
            with torch.autocast(kind, torch.bfloat16):
                return tower_loss(model, batch)

        return loss_fn

    plain, cpu, cuda = (
        stepgraph.forecast(model, loss_fn, batch, optimizer, passes=OFF)
        for loss_fn in (tower_loss, under("cpu"), under("cuda"))
    )
    assert cuda.peak_bytes == cpu.peak_bytes != plain.peak_bytes and cuda.step_s == cpu.step_s < plain.step_s


def test_the_peak_is_what_torch_allocates(given_batch):
    model, loss_fn, batch, optimizer = tower_step(rows=256, width=128, fused=True)
    options = stepgraph.StepOptions("exact", inductor="off")
    found = stepgraph.forecast(model, loss_fn, batch, optimizer, passes=options)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, passes=options)
    step(batch)
    state = [t for state in optimizer.state.values() for t in state.values()]
    held = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *batch.values(), *state])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(batch)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert held + peak == pytest.approx(found.peak_bytes, rel=0.02)


@pytest.mark.parametrize("fits", [True, False])
def test_capture_warns_of_a_step_that_does_not_fit_on_the_gpu(fits, monkeypatch, given_batch):
    model, loss_fn, batch, optimizer = tower_step()
    peak = stepgraph.forecast(model, loss_fn, batch, optimizer, passes="exact").peak_bytes
    on, memory = Target.on, 2.0 * peak if fits else 0.5 * peak
    monkeypatch.setattr(Target, "on", lambda device: dataclasses.replace(on(device), memory=memory))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepgraph.capture(model, loss_fn, batch, optimizer, passes="exact")
    said = [each for each in caught if "stepgraph.forecast" in str(each.message)]
    assert len(said) == (0 if fits else 1)
    assert all(each.filename == __file__ and len(str(each.message).splitlines()) == 1 for each in said)


@pytest.mark.parametrize("lora", [False, True])
def test_hugging_face_on_the_meta_device(lora):
    transformers = pytest.importorskip("transformers")
    # Wide: of narrow samples millions would fit, whose masks are numbers of the host.
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 8, "vocab_size": 128}
    config = transformers.Qwen3Config(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, **sizes)
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
        if lora:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    found = stepgraph.forecast(model, lambda model, batch: model(**batch, use_cache=False).loss, batch, optimizer)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert found.by_kind["parameters"] == sum(p.nbytes for p in model.parameters())
    assert 2 * trained <= found.by_kind["optimizer"] < 2 * trained + 4096  # two moments, and counts of steps
    assert found.largest_batch > 2 and any("modeling_qwen3.py" in held.source for held in found.largest)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "a100"}, "unknown device 'a100'"),
        ({"passes": ["dead_code"]}, "dead_code"),
        ({"accumulate": 5}, "accumulate=5"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(change, named):
    model, loss_fn, batch, optimizer = tower_step()
    if kind := change.pop("optimizer", None):
        optimizer = kind(model.parameters())
    with pytest.raises(ValueError, match=named.replace("[", r"\[")) as refused:
        stepgraph.forecast(model, loss_fn, batch, optimizer, **change)
    assert len(str(refused.value).splitlines()) == 1
    assert not any(map(compat.is_fake, model.parameters()))


def test_norms_of_a_forecast_are_those_of_the_gpu(given_batch):
    """A GPU keeps a norm's input and a number a row for backward; a CPU, on which the step is traced, two fp32 copies
    of the input."""
    model = Llama3(
        Llama3Config(dim=64, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=16, max_seq_len=512)
    )
    batch = {name: torch.zeros(512, 8, dtype=torch.int64) for name in ("tokens", "targets")}
    found = stepgraph.forecast(
        model.bfloat16(), next_token_loss, batch, torch.optim.AdamW(model.parameters(), fused=True), passes=OFF
    )
    assert found.largest and not [held for held in found.largest if "norm" in held.module and "fp32" in held.type]
