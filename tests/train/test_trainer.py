"""A run from end to end: what it prints and leaves behind, and that its numbers are those of a plain eager loop."""

import dataclasses
import importlib.metadata
import json
import re
import statistics
import types

import pytest
import torch

from stepgraph import cli
from stepgraph.config import build
from stepgraph.config.train import TrainConfig
from stepgraph.models import next_token_loss
from stepgraph.passes import PassReport
from stepgraph.train import trainer as trainer_module
from stepgraph.train.data import PackedLoader, open_data, validation_batches
from stepgraph.train.records.folder import Summary
from stepgraph.train.start import lr_at, pass_lines
from stepgraph.train.trainer import Figures, Run

PROGRESS = re.compile(
    r"step (\d+)/12 \| loss \d+\.\d{4} \| lr \d\.\de-\d\d \| grad_norm \d+\.\d\d \| \d+(\.\d+)? ms \| "
    r"\d+(\.\d+)?[kM]? tok/s \| mem \d+\.\d GiB \| eta \d+(\.\d)?[smhd]"
)


@pytest.fixture(scope="module")
def finished(trainer, tmp_path_factory):
    """A finished run in a process of its own: (folder, what it printed)."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    process = trainer.start("--out", folder, "--dump-graphs")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return folder, printed


def test_a_pass_that_was_asked_for_and_changed_nothing_is_printed_with_the_reason():
    notes = ["left in float32: layers.0.attn.q_proj"]
    report = PassReport("fp8_matmul", "numerics", "0 of 29 linear layers in fp8", matched=29, notes=notes)
    config = dataclasses.replace(cli.parse_train(["llama3-debug"]), fp8="tensorwise", inductor="off")
    printed = pass_lines(config, [report], torch.device("cpu"))
    assert "fp8_matmul [numerics]: 0 of 29 linear layers in fp8" in printed and f"\n   {notes[0]}" in printed


def test_what_a_run_prints_in_order(finished):
    folder, printed = finished
    parts = [
        r"stepgraph \S+, torch \S+, CPU with 1 thread\n",
        rf"run folder {re.escape(str(folder))}\n",
        r"config llama3-debug: data=\S+ seq_len=64 batch_size=4 steps=12 warmup_steps=2 device=cpu "
        r"val_every=5 val_batches=2 checkpoint_every=4 keep_checkpoints=20 dump_graphs=True "
        r"model\.dim=64 model\.n_layers=2 [^\n]*\n",
        r"data \S+: \d+ documents, .* train / .* validation\n",
        r"model llama3-debug: 115,008 parameters; fp32\n",
        r"mesh one process; 1 microbatch x 4 x 64 tokens, 256 tokens per step\n",
        r"graph captured in \d+\.\d s; nodes after passes: forward \d+, loss \d+, backward \d+, optimizer \d+\n",
        r"4 of \d+ passes changed the graph \(passes\.txt\)\n",
        r"ready in \d+\.\d s \(0\.0 s compiling\)\n",
        r"step 1/12 \| loss",
        r"\nstep 5 \| val_loss \d\.\d{4}\n",
        r"\nstep 10 \| val_loss \d\.\d{4}\n",
        r"done: 12 steps in \S+; validation loss \d\.\d{4}\n",
        rf"records in {re.escape(str(folder))}: page\.html, ",
        rf"stepgraph sample {re.escape(str(folder))} --prompt ",
        rf"stepgraph export {re.escape(str(folder))} --out FOLDER\n",
        rf"stepgraph train --resume {re.escape(str(folder))} --steps 24\n",
    ]
    assert re.search(".*?".join(parts), printed, re.DOTALL)
    progress = [line for line in printed.splitlines() if re.match(r"step \d+/", line)]
    assert [int(PROGRESS.fullmatch(line)[1]) for line in progress] == list(range(1, 13))


def test_what_a_run_leaves_behind(finished, trainer):
    folder, printed = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checkpoints", "config.json", "environment.json", "graph.txt", "graphs", "lock", "metrics.jsonl"),
        *("page.html", "passes.json", "passes.txt", "summary.json", "tb"),
    ]
    summary = trainer.summary(folder)
    assert list(summary) == [field.name for field in dataclasses.fields(Summary)]
    assert (summary["status"], summary["error"], summary["preset"]) == ("finished", None, "llama3-debug")
    assert (summary["steps"], summary["tokens"], summary["params"]) == (12, 12 * 256, 115_008)
    assert summary["mfu"] is None and summary["compile_s"] == 0
    assert summary["capture_s"] > 0 and summary["peak_mem_gib"] > 0.1 and summary["wall_s"] > summary["capture_s"]
    assert summary["tokens_per_s"] == pytest.approx(256 / (summary["step_ms_median"] / 1e3))
    assert summary["versions"]["torch"] == importlib.metadata.version("torch")
    assert f"validation loss {summary['val_loss_nats']:.4f}" in printed
    assert summary["val_loss_nats"] == trainer.metrics(folder, "val_loss")[-1][1] < 5.5

    config = TrainConfig.from_json((folder / "config.json").read_text())
    assert config == cli.parse_train(trainer.arguments("--out", folder, "--dump-graphs")[1:])
    assert json.loads((folder / "environment.json").read_text())["torch_threads"] == 1
    assert trainer.checkpoints(folder) == ["step-00000004", "step-00000008", "step-00000012"]
    assert [step for step, _ in trainer.metrics(folder, "val_loss")] == [5, 10, 12]

    reports = json.loads((folder / "passes.json").read_text())
    numbered = (folder / "passes.txt").read_text()
    assert all(f"{i}. {report['name']} [{report['tier']}]" in numbered for i, report in enumerate(reports, 1))
    assert "cuda_graph [exact]: skipped, the step has no CUDA tensors" in numbered and "skipped, the" not in printed
    assert f"4 of {len(reports)} passes changed the graph" in printed and "remove_noop_views" not in printed
    dumped = sorted(path.name for path in (folder / "graphs").iterdir())
    ran = [f"{i:02d}-{report['name']}.txt" for i, report in enumerate(reports, 1)]
    assert dumped == ["00-captured.txt", *ran]
    assert (folder / "graphs" / dumped[-1]).read_text() == (folder / "graph.txt").read_text()

    losses = trainer.metrics(folder, "loss")
    assert trainer.events(folder, "train/loss") == [(step, pytest.approx(loss)) for step, loss in losses]
    assert [step for step, _ in trainer.events(folder, "val/loss")] == [5, 10, 12]


def test_two_runs_with_one_seed_are_bitwise_equal(finished, trainer, tmp_path):
    assert trainer.here("--out", tmp_path / "again") == 0
    trainer.assert_same_run(finished[0], tmp_path / "again", 12)
    assert trainer.metrics(tmp_path / "again", "val_loss") == trainer.metrics(finished[0], "val_loss")


def eager_run(config):
    """The run as a plain loop in eager PyTorch: [(step, loss, grad_norm)] and the model."""
    data = open_data(config.data, config.tokenizer)
    loader = PackedLoader(
        data.source,
        data.tokenizer,
        batch_size=config.batch_size * config.accumulate,
        seq_len=config.seq_len,
        seed=config.seed,
    )
    model = build.build_model(config, torch.device("cpu"))
    params = list(model.parameters())
    # bf16: AdamW runs on fp32 copies, which are rounded back after each update.
    updated = [p.detach().float().requires_grad_() for p in params] if config.precision == "bf16" else params
    groups = [
        {"params": [p for p in updated if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in updated if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    history = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, config)
        batch, total = next(loader), 0
        for k in range(config.accumulate):
            part = {name: tensor.chunk(config.accumulate)[k] for name, tensor in batch.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16-autocast"):
                loss = next_token_loss(model, part) / config.accumulate
            loss.backward()
            total = total + loss.detach()
        limit = float("inf") if config.max_grad_norm is None else config.max_grad_norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(params, limit, norm)
        for p, copy in zip(params, updated, strict=True):
            copy.grad = p.grad.to(copy.dtype)
        optimizer.step()
        with torch.no_grad():
            for p, copy in zip(params, updated, strict=True):
                p.copy_(copy)
                p.grad = None
        history.append((step + 1, total.item(), norm.item()))
    return history, model


ONE_LAYER = ["--model.n-layers", 1]
GOLF = ["--model.dim", 64, "--model.n-layers", 1, "--model.n-heads", 4, "--model.n-kv-heads", 2, "--model.ffn-dim", 128]
GOLF += ["--model.vocab-size", 320, "--precision", "fp32"]


@pytest.mark.parametrize(
    "options",
    [
        ["--passes", "exact"],
        ["--precision", "bf16-autocast", "--passes", "exact", *ONE_LAYER],
        ["--precision", "bf16", "--passes", "exact", "--memory", "full"],
        ["--accumulate", 2, "--memory", "selective", "--schedule", "wsd", "--disable-pass", "dedupe_casts"],
        ["--accumulate", 2, "--precision", "bf16", "--schedule", "constant", "--max-grad-norm", "0.5", *ONE_LAYER],
        ["--memory", "budget=0.5", "--max-grad-norm", "None", *ONE_LAYER],
        ["golf", *GOLF, "--passes", "exact"],
    ],
    ids=lambda options: " ".join(map(str, options[:6])),
)
def test_a_run_is_bitwise_equal_to_a_plain_eager_loop(options, trainer, tmp_path):
    words = trainer.arguments("--steps", 6, "--out", tmp_path / "run", "--val-every", 0, "--checkpoint-every", 0)
    preset, options = (options[:1], options[1:]) if options[0] == "golf" else ([], options)
    words = [words[0], *preset, *words[1:], *map(str, options)]
    assert trainer.main(words) == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    history, model = eager_run(cli.parse_train([*words[1:], "--out", str(tmp_path / "eager")]))
    torch.set_num_threads(threads)
    assert trainer.metrics(tmp_path / "run", "loss", "grad_norm") == history
    tensors, _ = trainer.saved(tmp_path / "run", 6)
    for name, param in model.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], param), name
    reports = json.loads((tmp_path / "run/passes.json").read_text())
    reports = {r["name"]: r for r in reports if r["graph"] != "update"}
    assert (reports["recompute"]["changed"] > 0) == ("--memory" in options)
    assert ("dedupe_casts" in reports) == ("--disable-pass" not in options)


def test_what_compiles_is_started_before_ranks_meet(monkeypatch):
    order = []

    def meet(*_):
        order.append("meet")
        raise ValueError("nobody")

    monkeypatch.setattr(trainer_module.passes, "prepare", lambda given, *_: order.append(given))
    monkeypatch.setattr(trainer_module.parallel, "started", meet)
    config = TrainConfig()
    with pytest.raises(ValueError, match="nobody"):
        trainer_module.run(config)
    assert order == [config, "meet"]


def test_an_unknown_pass_is_refused_with_the_nearest(trainer, tmp_path, capsys):
    assert trainer.here("--disable-pass", "dedup_cast", "--out", tmp_path / "none") == 2
    assert "dedupe_casts" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_inductor_compiles_on_request_and_keeps_the_losses_close(finished, trainer, tmp_path):
    assert trainer.here("--inductor", "full", "--out", tmp_path / "run") == 0
    assert trainer.summary(tmp_path / "run")["compile_s"] > 0
    losses, expected = trainer.metrics(tmp_path / "run", "loss"), trainer.metrics(finished[0], "loss")
    assert losses == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in expected]


def test_running_one_step_ahead_of_the_host_as_on_a_gpu_changes_no_record(finished, trainer, tmp_path, monkeypatch):
    original = Run.__init__

    def ahead(self, *args):
        original(self, *args)
        self.runs_ahead = True

    monkeypatch.setattr(Run, "__init__", ahead)
    assert trainer.here("--out", tmp_path / "run") == 0
    trainer.assert_same_run(finished[0], tmp_path / "run", 12)
    assert trainer.metrics(tmp_path / "run", "val_loss") == trainer.metrics(finished[0], "val_loss")


def test_reported_step_times_leave_out_validations_and_saves(trainer, tmp_path, monkeypatch):
    """By a clock that moves in steps, validations, saves and pages alone."""
    now, steps = [0.0], [10.0 + i % 3 for i in range(12)]  # s, ms
    spent = {name: iter(lambda: 0.2, None) for name in ("_validate", "_save", "_show")}
    spent["_launch"] = iter([ms / 1e3 for ms in steps])

    def timed(name):
        original = getattr(Run, name)

        def call(self, **options):
            now[0] += next(spent[name])
            return original(self, **options)

        return call

    for name in spent:
        monkeypatch.setattr(Run, name, timed(name))
    monkeypatch.setattr("stepgraph.train.trainer.time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    options = [*ONE_LAYER, "--steps", 12, "--val-every", 5, "--checkpoint-every", 4]
    assert trainer.here("--out", tmp_path / "run", *options) == 0
    assert now[0] > (sum(steps) / 1e3) + 4 * 0.2
    times = [ms for _, ms in trainer.metrics(tmp_path / "run", "step_ms")]
    assert times == pytest.approx(steps)
    assert trainer.summary(tmp_path / "run")["step_ms_median"] == pytest.approx(statistics.median(times[2:]))


def test_steps_that_run_ahead_are_timed_by_the_gpu_from_the_second_on(trainer, tmp_path, monkeypatch):
    """The second is in flight when the first is recorded: by the host's clock, it would take what is left of it."""
    original = Run.__init__

    def ahead(self, *args):
        original(self, *args)
        self.runs_ahead = True

    monkeypatch.setattr(Run, "__init__", ahead)
    monkeypatch.setattr(Figures, "ms_since", lambda self, before: None if before is None else 12345.0)
    assert trainer.here("--out", tmp_path / "run", *ONE_LAYER, "--steps", 4) == 0
    times = [ms for _, ms in trainer.metrics(tmp_path / "run", "step_ms")]
    assert times[1:3] == [12345.0] * 2 and 12345.0 not in (times[0], times[3])  # the page follows the third


def test_hugging_face_weights_out_and_in(finished, trainer, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    assert trainer.here("--out", tmp_path / "one", "--seed", 1, "--export-hf", tmp_path / "hf") == 0
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)

    def loss(batch):
        with torch.no_grad():
            logits = model(batch["tokens"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).item()

    data = open_data(str(trainer.corpus), "bytes")
    batches = validation_batches(data.source, data.tokenizer, batch_size=4, seq_len=64, n=2)
    expected = trainer.summary(tmp_path / "one")["val_loss_nats"]
    assert statistics.fmean(map(loss, batches)) == pytest.approx(expected, rel=1e-5)

    options = ["--init-from-hf", tmp_path / "hf", "--seed", 7, "--steps", 3, "--export-hf", tmp_path / "hf2"]
    assert trainer.here("--out", tmp_path / "two", *options) == 0
    first = next(PackedLoader(data.source, data.tokenizer, batch_size=4, seq_len=64, seed=7))
    assert trainer.metrics(tmp_path / "one", "loss")[0] != trainer.metrics(finished[0], "loss")[0]  # another seed
    assert trainer.metrics(tmp_path / "two", "loss")[0] == (1, pytest.approx(loss(first), rel=1e-5))
    assert (tmp_path / "hf2" / "model.safetensors").is_file()

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id == tokenizer.eos_token_id == data.tokenizer.eos_id
    assert model.config.bos_token_id is None
    text = "def été():\r\n\t return '日本', \u0000   # 😀"
    assert tokenizer(text)["input_ids"] == data.tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    # Of the finished run, `stepgraph export` writes the same, and a checkpoint before the last something else.
    assert trainer.main(["export", str(tmp_path / "one"), "--out", str(tmp_path / "hf3")]) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "hf3").iterdir()}
    earlier = tmp_path / "one" / "checkpoints" / "step-00000004"
    assert trainer.main(["export", str(earlier), "--out", str(tmp_path / "hf4")]) == 0
    assert (
        trainer.main(["sample", str(earlier), "--prompt", "import", "--max-new-tokens", "9", "--temperature", "0"]) == 0
    )
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf4", dtype=torch.float32)
    prompt = torch.tensor([[data.tokenizer.eos_id, *b"import"]])
    made = theirs.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, 1:]
    assert capsys.readouterr().out.endswith(f"\n{tokenizer.decode(made, skip_special_tokens=True)}\n")
    assert trainer.main(["export", str(earlier), "--out", str(tmp_path / "hf4")]) == 2
    assert capsys.readouterr().err == f"error: out={tmp_path / 'hf4'} is not empty: use a new folder\n"
    assert written["model.safetensors"] != (tmp_path / "hf4" / "model.safetensors").read_bytes()
