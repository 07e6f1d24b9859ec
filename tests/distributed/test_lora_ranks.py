"""Adapters over ranks: frozen weights in shards without gradients, in fewer bits too; a run on one mesh and another."""

import dataclasses
import shutil
import tempfile
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers
from safetensors import safe_open

import stepgraph
from stepgraph.cli import parse_train
from stepgraph.config import build, hf_weights
from stepgraph.config.files import run_config
from stepgraph.config.hf_weights import save_hf
from stepgraph.costs.memory import peak_bytes
from stepgraph.graph.collectives import ALL_GATHER, REDUCE_SCATTER
from stepgraph.graph.values import Gradient, OptimizerState, Parameter
from stepgraph.integrations import GraphTrainer
from stepgraph.kernels.quant import quantize_experts, quantize_linear
from stepgraph.options import StepOptions
from stepgraph.parallel import layouts, local_parts, mean_over_mesh, parallelize
from stepgraph.train.saving import load_trained
from tests.distributed.hf_ranks import as_launched, close, logged, rows, train
from tests.distributed.hf_ranks import build as build_hf
from tests.distributed.ranks import make_mesh, on_ranks
from tests.distributed.test_hf_ranks import _Watched
from tests.distributed.test_train import records, saved, train_on
from tests.train.fine_tuning import make

LONG = pytest.mark.long
ADAPTED = ["q_proj", "v_proj", "up_proj"]


def adapted(kind, layers=1):
    """The same on every rank; B is drawn, so that A has a gradient."""
    base = build_hf("qwen3-moe" if "experts" in kind else "llama3.2", num_hidden_layers=layers)
    if kind in ("nf4", "fp8"):
        quantize_linear(base, kind, skip=["lm_head"])
    targets = dict(target_modules=ADAPTED, use_dora=kind == "dora")
    if "experts" in kind:
        targets = dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    lora = peft.LoraConfig(r=4, init_lora_weights=False, **targets)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)
    if kind == "nf4-experts":
        assert len(quantize_experts(model, "nf4")[0]) == 2
    return model


def _optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


@pytest.mark.parametrize(
    "kind", ["nf4", *(pytest.param(kind, marks=LONG) for kind in ("whole", "fp8", "dora", "experts", "nf4-experts"))]
)
def test_own_loop(kind):
    on_ranks(2, _own_loop, kind)


def _own_loop(kind):
    ids = torch.stack([row["input_ids"] for row in rows(4)])
    batch, mesh = {"input_ids": ids, "labels": ids}, make_mesh("fsdp=2")
    own = {key: value.chunk(2)[dist.get_rank()] for key, value in batch.items()}
    alone, model = adapted(kind), parallelize(adapted(kind), mesh)
    plain, mine = _optimizer(alone), _optimizer(model)
    options = StepOptions(passes="exact", reshard="always") if kind == "nf4" else "exact"
    whole = stepgraph.capture(alone, lambda model, batch: model(**batch).loss, batch, plain, passes="exact")
    step = stepgraph.capture(model, lambda m, b: mean_over_mesh(m(**b).loss, mesh), own, mine, passes=options)
    report = step.verify(own)
    assert report.bitwise, report
    found, expected = zip(*[(step(own).item(), whole(batch).item()) for _ in range(3)], strict=True)
    close(found, expected, 1e-5)
    assert expected[2] < expected[0]

    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert len(trained) == {"dora": 9, "experts": 4, "nf4-experts": 4}.get(kind, 6) and all(
        "lora_" in name for name in trained
    )
    assert {i.what.parameter for i in step.graph.inputs if isinstance(i.what, OptimizerState)} == trained
    assert {what.parameter for what in step.graph.outputs if isinstance(what, Gradient)} <= trained

    def moved(target, dtype):
        found = (n.meta["val"] for n in step.graph.graph.find_nodes(op="call_function", target=target))
        return sum(tensor.nbytes for tensor in found if tensor.dtype == dtype)

    shards = {name: param.to_local() for name, param in model.named_parameters()}
    packed = {name: shard.nbytes for name, shard in shards.items() if shard.dtype == torch.uint8}
    assert bool(packed) == (kind in ("nf4", "fp8", "nf4-experts"))
    # Frozen embeddings need no gradient of the first layer's input, and nothing else is gathered twice than is read.
    again = sum(size for name, size in packed.items() if not any(n in name for n in ("q_proj", "k_proj", "v_proj")))
    assert moved(ALL_GATHER, torch.uint8) == 2 * (sum(packed.values()) + (again if kind == "nf4" else 0))
    assert moved(REDUCE_SCATTER, torch.float32) == sum(shards[name].nbytes for name in trained)

    def held(step):
        return sum(node.meta["val"].nbytes for node in step.graph.placeholders(Parameter))

    assert held(step) == sum(shard.nbytes for shard in shards.values()) < 0.55 * held(whole)
    assert peak_bytes(step.program) < peak_bytes(whole.program)


LORA = ["--lora", "r=4,alpha=8", "--seq-len", "64", "--lr", "1e-2", "--device", "cpu"]


def _folder(path):
    """Conversations, and a checkpoint with a tokenizer."""
    make(path)
    return ["--init-from-hf", str(path / "base"), "--data", str(path / "chat.jsonl"), *LORA]


def _merged_and_adapted(path, exported, quantize, precision):
    """Logits of the exported weights, and of the base with the exported adapter, as transformers and peft load them."""
    tokens = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(0))
    base = transformers.AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
    if quantize:
        if precision == "bf16":  # what the bits were made of
            for name, param in base.named_parameters():
                param.data = param.bfloat16().float() if "_proj" in name else param
        quantize_linear(base, quantize, skip=["lm_head"])
    models = [transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32), base]
    models[1] = peft.PeftModel.from_pretrained(base, exported / "adapter")
    with torch.no_grad():
        return [model(tokens).logits for model in models]


def test_shards_and_what_is_exported(tmp_path):
    """Each rank has its part of the weights that one process would have, and rank 0 writes them whole."""
    words = [*_folder(tmp_path), "--precision", "bf16", "--quantize", "nf4"]
    on_ranks(2, _shards, words, tmp_path)
    torch.testing.assert_close(*_merged_and_adapted(tmp_path, tmp_path / "out", "nf4", "bf16"), rtol=1e-4, atol=1e-4)


def _shards(words, folder):
    config = parse_train([*words, "--mesh", "fsdp=2"])
    device, mesh = torch.device("cpu"), make_mesh("fsdp=2")
    build.seed_all(0)
    one = build.build_model(dataclasses.replace(config, mesh=None), device)
    build.seed_all(0)
    model = build.build_model(dataclasses.replace(config, document_mask="on"), device, mesh)
    placed = layouts(model)
    for (name, param), whole in zip(model.named_parameters(), one.parameters(), strict=True):
        assert (param.dtype, param.requires_grad) == (whole.dtype, whole.requires_grad), name
        assert torch.equal(placed[name].own(param.to_local()), placed[name].cut(whole)), name
        assert param.dtype == (torch.uint8 if "proj" in name and "lora_" not in name else torch.bfloat16), name
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.to_local().fill_(0.02)
    save_hf(model, folder / "out")


@pytest.mark.parametrize("form", ["bf16", pytest.param("lora", marks=LONG)])
def test_each_rank_reads_its_part(tmp_path, form):
    words = _folder(tmp_path)
    build_hf("qwen3-moe", tie_word_embeddings=True, vocab_size=320).save_pretrained(tmp_path / "base")
    if form == "bf16":
        at = words.index("--lora")
        del words[at : at + 2]
    on_ranks(2, _reads_its_part, [*words, "--precision", "bf16-autocast" if form == "lora" else form])


def _reads_its_part(words):
    asked, device, mesh = [], torch.device("cpu"), make_mesh("fsdp=2")
    config = parse_train([*words, "--mesh", "fsdp=2"])
    build.seed_all(0)
    one = build.build_model(dataclasses.replace(config, mesh=None), device)
    build.seed_all(0)
    with patch.object(hf_weights, "safe_open", lambda *a, **k: _Watched(safe_open(*a, **k), asked)):
        model = build.build_model(config, device, mesh)
    placed, parts = layouts(model), local_parts(model)
    for (name, param), whole in zip(model.named_parameters(), one.parameters(), strict=True):
        assert param.requires_grad == whole.requires_grad, name
        assert torch.equal(parts[name].tensor, placed[name].cut(whole).to(param.dtype)), name
    assert sum(asked) == sum(part.tensor.numel() for name, part in parts.items() if "lora_" not in name)
    total = sum(p.numel() for name, p in one.named_parameters() if "lora_" not in name)
    assert total / 2 <= sum(asked) < 0.51 * total


@LONG
@pytest.mark.parametrize(
    ("precision", "quantize"), [("fp32", "nf4"), ("bf16", None), ("bf16-autocast", "fp8"), ("fp32", "all")]
)
def test_a_run_on_two_ranks_and_on_one(tmp_path, precision, quantize):
    """The same losses; each continues from the other's checkpoint. ``all``: every weight is trained."""
    words, one, two, near = _folder(tmp_path), tmp_path / "one", tmp_path / "two", 1e-5 if precision == "fp32" else 1e-2
    if quantize == "all":
        at = words.index("--lora")
        del words[at : at + 2]
    words += ["--quantize", quantize] if quantize in ("nf4", "fp8") else []
    words += ["--precision", precision, "--accumulate", "2", "--steps", "4", "--checkpoint-every", "2", "--verify"]
    words += ["--val-every", "2", "--val-batches", "2", "--passes", "exact", "--saved-steps", "off"]
    words += ["--keep-checkpoints", "9"]
    train_on(1, *words, "--batch-size", "2", "--out", one)
    train_on(2, *words, "--batch-size", "1", "--mesh", "fsdp=2", "--out", two, "--export-hf", tmp_path / "out")

    def curve(run):
        return [value for name in ("loss", "val_loss") for _, value in records(run, name)]

    expected = curve(one)
    assert len(expected) == 6 and expected[3] < expected[0]
    close(curve(two), expected, near)
    names = saved(two / "checkpoints/step-00000004").keys()
    assert names == saved(one / "checkpoints/step-00000004").keys()
    assert quantize == "all" or all("lora_" in name for name in names if name.startswith(("model.", "optimizer.")))
    if quantize != "all":
        torch.testing.assert_close(
            *_merged_and_adapted(tmp_path, tmp_path / "out", quantize, precision), rtol=1e-3, atol=1e-3
        )
    for run, world, mesh, size in ((two, 1, "fsdp=1", "2"), (one, 2, "fsdp=2", "1")):
        shutil.rmtree(run / "checkpoints/step-00000004")
        export = ["--export-hf", tmp_path / "again"] if run == two else []
        train_on(world, "--resume", run, "--mesh", mesh, "--batch-size", size, *export)
        close(curve(run), expected, near)
    model, step = load_trained(two, run_config(two))
    assert step == 4 and {p.dtype for p in model.parameters() if p.requires_grad} == {
        torch.bfloat16 if precision == "bf16" else torch.float32
    }


@LONG
def test_the_trainer_over_quantized_shards():
    on_ranks(2, as_launched, _trainer)


def _trainer():
    for kind in ("nf4", "fp8"):
        with tempfile.TemporaryDirectory() as folder:
            plain = train(transformers.Trainer, f"{folder}/plain", adapted(kind))
            trainer = train(GraphTrainer, f"{folder}/graph", adapted(kind), own={"passes": "exact"}, fsdp=True)
            close(logged(trainer, "loss"), logged(plain, "loss"), 1e-5)
            assert {p.dtype for p in trainer.model.parameters()} == {torch.uint8, torch.float32}
