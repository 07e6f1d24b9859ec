"""`GraphTrainer` over ranks: Hugging Face models as they are, compared with plain ``Trainer`` on one process."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments

import stepgraph
from stepgraph.integrations import GraphTrainer, PadToLengths
from stepgraph.integrations.ranks import join_groups, mesh_spec
from stepgraph.parallel import MeshSpec, mean_over_mesh, parallelize
from tests.distributed.hf_ranks import (
    LENGTH,
    as_launched,
    build,
    check_ranks,
    check_what_ranks_saved,
    close,
    logged,
    one_process,
    rows,
    train,
)
from tests.distributed.ranks import make_mesh, on_ranks

LONG = pytest.mark.long


CASES = {  # model, GraphTrainer's own options, TrainingArguments'
    "llama": ("llama3.2", {}, {"fsdp": True}),
    "qwen": ("qwen3", {}, {"fsdp": True}),
    "gemma": ("gemma3", {}, {"fsdp": True}),
    "experts sharded": ("qwen3-moe", {}, {"fsdp": True}),
    "experts over ranks": ("qwen3-moe", {"mesh": "fsdp=2,ep=2"}, {}),
    "replicas": ("qwen3", {}, {}),
    "sequences": ("llama3.2", {"mesh": "cp=2"}, {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "llama" else LONG) for case in CASES])
def test_models_over_ranks(tmp_path, case):
    name, own, options = CASES[case]
    one_process(tmp_path, name)
    on_ranks(2, as_launched, _check, tmp_path, name, own, options)
    check_what_ranks_saved(tmp_path, name)


def _check(folder, name, own, options):
    check_ranks(folder, name, own, **options)


@pytest.mark.parametrize(
    ("mesh", "context"),
    [("cp=2", "gather"), *(pytest.param("fsdp=2,cp=2", c, marks=LONG) for c in ("ulysses", "gather"))],
)
def test_ranks_that_share_sequences(tmp_path, mesh, context):
    """Microbatches, evaluation and predictions of whole sequences, each counted once, are those of one process."""
    plain = train(Trainer, tmp_path / "one", build("qwen3"), eval_strategy="steps", eval_steps=3)
    found = {key: logged(plain, key) for key in ("loss", "eval_loss")}
    predictions = torch.from_numpy(plain.predict(rows(6)).predictions)
    torch.save(found | {"predictions": predictions}, tmp_path / "one.pt")
    spec = MeshSpec.parse(mesh)
    on_ranks(spec.size, as_launched, _shared, tmp_path, mesh, context, 4 // spec.dp)


def _shared(folder, mesh, context, batch):
    own = {"passes": "exact", "mesh": mesh, "parallel": {"context": context}}
    sizes = {"per_device_train_batch_size": batch // 2, "gradient_accumulation_steps": 2}
    evaluated = {"per_device_eval_batch_size": batch, "eval_strategy": "steps", "eval_steps": 3}
    trainer = train(GraphTrainer, folder / "ranks", build("qwen3"), own=own, **sizes, **evaluated)
    expected = torch.load(folder / "one.pt", weights_only=True)
    for key in ("loss", "eval_loss"):
        close(logged(trainer, key), expected[key])
    found = trainer.predict(rows(6))  # the last batch has fewer rows
    torch.testing.assert_close(torch.from_numpy(found.predictions), expected["predictions"], rtol=1e-4, atol=1e-5)
    assert found.label_ids.shape == (6, LENGTH)
    with pytest.raises(ValueError, match=r"^label_smoothing_factor computes a loss from the logits of whole sequences"):
        train(GraphTrainer, folder / "ranks", build("qwen3"), own=own, label_smoothing_factor=0.1)
    with pytest.raises(
        ValueError, match=r"^cp splits sequences, and Gemma3ForCausalLM has layers of sliding_attention"
    ):
        train(GraphTrainer, folder / "ranks", build("gemma3"), own=own)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers(tmp_path, launcher):
    """A user's script, as the documentation starts it: replicas with torchrun, shards with accelerate's FSDP2."""
    script = [str(Path(__file__).with_name("hf_launched.py")), str(tmp_path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2"]
    command = torchrun if launcher == "torchrun" else [*accelerate, "--num_processes", "2", "--main_process_port", "0"]
    root = Path(__file__).parents[2]
    subprocess.run([*command, *script], check=True, timeout=300, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
    found = json.loads((tmp_path / "losses.json").read_text())
    assert found["ranks"] == 2 and found["sharded"] == (launcher == "accelerate")
    one_process(tmp_path, "qwen3")
    close(found["losses"], torch.load(tmp_path / "one.pt", weights_only=True)["loss"])


def test_steps_as_trainer_takes_them(tmp_path):
    on_ranks(2, as_launched, _steps, tmp_path)


def _steps(folder):
    # The epoch ends with microbatches of two sequences and of one, on each rank.
    beside_trainer(folder, gradient_accumulation_steps=2, max_grad_norm=0.3, data=rows(14))
    beside_trainer(folder, tolerance=2e-2, bf16=True, fsdp=True)
    _lengths(folder)
    _own_optimizer(folder)


def beside_trainer(folder, tolerance=3e-6, data=None, fsdp=False, **options):
    """`GraphTrainer` logs what ``Trainer`` over the same ranks does in ``DistributedDataParallel``."""
    own = {"passes": "exact", "mesh": "fsdp=2" if fsdp else None}
    plain = train(Trainer, folder / "plain", build("qwen3"), data=data, **options)
    trainer = train(GraphTrainer, folder / "graph", build("qwen3"), own=own, data=data, **options)
    compared = 0
    for expected, found in zip(plain.state.log_history[:-1], trainer.state.log_history[:-1], strict=True):
        assert expected.keys() == found.keys()
        for key in expected.keys() & {"loss", "eval_loss", "grad_norm", "learning_rate"}:
            close([found[key]], [expected[key]], tolerance * (100 if key == "grad_norm" else 1))
            compared += 1
    assert compared > 5
    return trainer


def _cut(examples):
    """A batch whose length depends on the rank, as of a collate function that pads to the longest."""
    length = LENGTH - 3 * dist.get_rank()
    return {name: torch.stack([row[name][:length] for row in examples]) for name in examples[0]}


def _lengths(folder):
    with pytest.raises(ValueError, match=r"rank 0 and of rank 1 differ in form.*PadToLengths"):
        train(GraphTrainer, folder / "refused", build("qwen3"), own={"data_collator": _cut})
    plain = train(Trainer, folder / "plain", build("qwen3"), own={"data_collator": _cut})
    padded = PadToLengths((LENGTH - 3, LENGTH, 2 * LENGTH), _cut, causal=True)
    trainer = train(GraphTrainer, folder / "padded", build("qwen3"), own={"data_collator": padded, "passes": "exact"})
    close(logged(trainer, "loss"), logged(plain, "loss"))
    assert len(trainer.captured.graphs) == 1 and len(trainer.captured._forms) == 1


def _own_optimizer(folder):
    """An optimizer of the user, made for the whole model, and a schedule of its own."""
    found = []
    for kind in (Trainer, GraphTrainer):
        model = build("llama3.2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        own = {"optimizers": (optimizer, schedule)} | ({"passes": "exact"} if kind is GraphTrainer else {})
        found.append(train(kind, folder / "own", model, own=own))
    close(logged(found[1], "loss"), logged(found[0], "loss"))
    assert logged(found[1], "learning_rate") == logged(found[0], "learning_rate")


REFUSED = {
    "offload": ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, None, "cpu_offload"),
    "version 1": ({"fsdp": True, "fsdp_config": {"version": 1}}, None, "version 1"),
    "checkpointing": (
        {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
        None,
        "gradient_checkpointing",
    ),
    "bf16 evaluation": ({"bf16_full_eval": True}, None, "bf16_full_eval"),
    "tensors split": ({}, "fsdp=1,tp=2", "drop tp and pp"),
    "ranks": ({}, "fsdp=4", "4 ranks and there are 2 processes"),
    "no such axis": ({}, "dp=2", "mesh axis"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, case):
    options, mesh, match = REFUSED[case]
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **options)
    with (
        mock.patch.object(TrainingArguments, "world_size", property(lambda self: 2)),
        pytest.raises(ValueError, match=match),
    ):
        mesh_spec(arguments, mesh)


def test_what_the_arguments_ask_for(tmp_path, monkeypatch):
    def asked(world, mesh=None, **options):
        arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **options)
        with mock.patch.object(TrainingArguments, "world_size", property(lambda self: world)):
            return str(mesh_spec(arguments, mesh))

    assert asked(2) == "ddp=2" and asked(4, fsdp=True) == "fsdp=4" and asked(1) == "None"
    assert asked(4, "hsdp=2x2") == "hsdp=2x2" and asked(2, "fsdp=2,ep=2") == "fsdp=2,ep=2"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert asked(4) == "fsdp=4"
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert asked(4) == "hsdp=2x2"
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert asked(4) == "fsdp=2,cp=2"
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ValueError, match="tp_size=2"):
        asked(4)


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(n, marks=LONG) for n in ("qwen3", "llama3.2", "qwen3-moe"))])
def test_own_loop(name):
    on_ranks(2, _own_loop, name)


def _own_loop(name):
    """`parallelize` and `capture`: the loss of one process that has the batch of both ranks, bitwise eager."""
    meshes = ["fsdp=2", *(["fsdp=2,ep=2"] if name == "qwen3-moe" else [])]
    ids = torch.stack([row["input_ids"] for row in rows(4)])
    batch = {"input_ids": ids, "labels": ids}
    with torch.no_grad():
        expected = build(name)(**batch).loss
    own = {key: value.chunk(2)[dist.get_rank()] for key, value in batch.items()}
    for text in meshes:
        mesh = make_mesh(text)
        model = parallelize(build(name), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def loss_fn(model, batch, mesh=mesh):
            return mean_over_mesh(model(**batch).loss, mesh)

        step = stepgraph.capture(model, loss_fn, own, optimizer, max_grad_norm=1.0, passes="exact")
        report = step.verify(own)
        assert report.bitwise, report
        close([step(own)], [expected], 1e-6)


def test_groups_of_the_optimizer_are_those_of_one_process():
    """Each is one over several meshes; with LoRA nothing is left for the group without weight decay."""
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    a.device_mesh = b.device_mesh = "dp"
    c.device_mesh = "ep"
    model = torch.nn.ParameterList([a, c, b])
    for given, expected in (
        ([[a, b], [c], []], [[a, c, b], []]),
        ([[], [a, b], [c]], [[], [a, c, b]]),
        ([[a], [b], [c]], [[a], [c, b]]),
    ):
        optimizer = torch.optim.SGD([{"params": params} for params in given])
        join_groups(optimizer, model)
        assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
            list(map(id, g)) for g in expected
        ]


@pytest.mark.long
def test_lora_and_the_best_model():
    on_ranks(2, as_launched, _lora_and_the_best_model)


def _lora_and_the_best_model():
    """Adapters over shards, resumed; and the best checkpoint, loaded at the end, with recomputed activations."""
    peft = pytest.importorskip("peft")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # one for both ranks
        folder = Path(folders[0])

        def adapted():
            torch.manual_seed(0)
            return peft.get_peft_model(build("llama3.2"), peft.LoraConfig(r=4, init_lora_weights=False))

        own, saved = {"passes": "exact"}, {"save_strategy": "steps", "save_steps": 3}
        plain = train(Trainer, folder / "plain", adapted())
        trainer = train(GraphTrainer, folder / "lora", adapted(), own=own, fsdp=True, **saved)
        close(logged(trainer, "loss"), logged(plain, "loss"))
        again = train(GraphTrainer, folder / "again", adapted(), folder / "lora/checkpoint-3", own=own, fsdp=True)
        assert logged(again, "loss") == logged(trainer, "loss")
        again = train(Trainer, folder / "again", adapted(), folder / "lora/checkpoint-3")
        close(logged(again, "loss"), logged(trainer, "loss"))
        assert (folder / "lora/checkpoint-6/adapter_model.safetensors").exists()

        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
        evaluated = {"eval_strategy": "steps", "eval_steps": 3, "gradient_checkpointing": True}
        trainer = train(GraphTrainer, folder / "best", build("qwen3"), own=own, fsdp=True, **saved, **best, **evaluated)
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(max(logged(trainer, "eval_loss")[:2]), rel=1e-6)
        dist.barrier()
