"""DPO over ranks: the loss and metrics of all ranks' pairs, next to a frozen reference in shards; a run on a mesh."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import transformers

from stepgraph.capture.python import metrics
from stepgraph.cli import parse_train
from stepgraph.config import build
from stepgraph.graph.values import Gradient
from stepgraph.train.data import PackedLoader, open_data
from stepgraph.train.start import with_document_mask
from tests.distributed.hf_ranks import close
from tests.distributed.ranks import make_mesh, on_ranks
from tests.distributed.test_train import records, saved, train_on
from tests.train.fine_tuning import make

LONG = pytest.mark.long
CPU = torch.device("cpu")
NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
WORDS = ["--loss", "dpo", "--beta", "0.3", "--seq-len", "128", "--batch-size", "1", "--lr", "3e-3", "--device", "cpu"]
WORDS += ["--passes", "exact", "--warmup-steps", "0", "--schedule", "constant", "--saved-steps", "off"]


def folder(path):
    """Pairs of answers that differ in length, so that rows hold different numbers of them, and a small Qwen3."""
    make(path)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=320, num_key_value_heads=2, **shape))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3) if param.ndim > 1 else None
    model.save_pretrained(path / "base")
    pairs = [
        {"prompt": f"What is {i}?", "chosen": f"It is {i}." * (1 + i % 5), "rejected": f"Not {i}."} for i in range(40)
    ]
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return ["--init-from-hf", str(path / "base"), "--data", str(path / "pairs.jsonl"), *WORDS]


def made(words, mesh, batch):
    """The captured step, and the model, of one process or of a rank of ``mesh``."""
    config = with_document_mask(parse_train([*words, *([] if mesh is None else ["--mesh", mesh])]), True)
    mesh = None if mesh is None else make_mesh(mesh)
    build.seed_all(0)
    model = build.build_model(config, CPU, mesh)
    optimizer, loss = build.build_optimizer(config, model), build.build_loss(config, CPU, mesh)
    return build.build_step(config, build.step_spec(config, model, loss, batch, optimizer)), model


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp=2", []),
        pytest.param("ddp=2", ["--lora", "r=4"], marks=LONG),
        pytest.param("fsdp=2", ["--lora", "r=4", "--quantize", "nf4"], marks=LONG),
        pytest.param("hsdp=2x2", ["--precision", "bf16-autocast"], marks=LONG),
    ],
    ids=str,
)
def test_a_step_is_eager_and_that_of_one_process(tmp_path, mesh, options):
    on_ranks(4 if "x" in mesh else 2, _step, [*folder(tmp_path), *options], mesh)


def _step(words, mesh):
    path, ranks = words[words.index("--data") + 1], dist.get_world_size()
    data = open_data(path, path.replace("pairs.jsonl", "base/tokenizer.json"), "chosen,rejected", 128)
    sizes = dict(batch_size=1, seq_len=128, positions=True, seed=0, world_size=ranks)
    loaders = [PackedLoader(data.source, data.tokenizer, rank=rank, **sizes) for rank in range(ranks)]
    steps = [[next(loader) for loader in loaders] for _ in range(3)]
    assert len({float(batch["pairs_per_row"]) for batches in steps for batch in batches}) > 1
    whole = [
        {k: torch.cat([b[k] for b in batches]) if value.ndim else torch.stack([b[k] for b in batches]).mean()
         for k, value in batches[0].items()}
        for batches in steps
    ]  # fmt: skip
    own = [batches[dist.get_rank()] for batches in steps]
    step, model = made(words, mesh, own[0])
    report = step.verify(own[0])
    assert report.bitwise, report
    config = with_document_mask(parse_train(words), True)
    build.seed_all(0)
    plain, loss_fn = build.build_model(config, CPU), build.build_loss(config, CPU)
    optimizer = build.build_optimizer(config, plain)
    near = 5e-2 if "bf16-autocast" in words else 1e-4
    seen = []
    for batch, mine in zip(whole, own, strict=True):
        with metrics.collected() as expected:
            loss = loss_fn(plain, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3
        optimizer.step()
        optimizer.zero_grad()
        seen.append([loss.item(), norm.item(), *(value.item() for value in expected.values())])
        close([step(mine).item(), *(step.metrics[name].item() for name in ("grad_norm", *expected))], seen[-1], near)
    assert len(expected) == 4 and all(len(set(column)) > 1 for column in zip(*seen, strict=True))

    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {what.parameter for what in step.graph.outputs if isinstance(what, Gradient)} <= trained
    held = [node.meta["val"].shape for node in step.graph.graph.find_nodes(op="get_attr")]  # of a reference of its own
    rows = {shape[0] for shape in held if len(shape) == 2 and shape[1] == 32 and shape[0] >= 160}
    assert rows == (set() if "--lora" in words else {160}), held


@LONG
@pytest.mark.parametrize("lora", [[], ["--lora", "r=4"]], ids=["whole", "lora"])
def test_a_run_on_two_ranks_and_on_one(tmp_path, lora):
    """The same losses, rewards and validation; each continues from the other's checkpoint; both export."""
    words, one, two = [*folder(tmp_path), *lora], tmp_path / "one", tmp_path / "two"
    words += ["--accumulate", "2", "--steps", "4", "--checkpoint-every", "2", "--verify", "--keep-checkpoints", "9"]
    words += ["--val-every", "2", "--val-batches", "2", "--val-data", tmp_path / "pairs.jsonl"]
    train_on(1, *words, "--batch-size", "2", "--out", one, "--export-hf", tmp_path / "out-one")
    train_on(2, *words, "--mesh", "fsdp=2", "--out", two, "--export-hf", tmp_path / "out-two")

    def curves(run):
        return [[value for _, value in records(run, name)] for name in (*NAMES, "val_loss", "val_rewards/margins")]

    def same():
        for found, expected in zip(curves(two), curves(one), strict=True):
            close(found, expected, 1e-4)

    same()
    assert saved(two / "checkpoints/step-00000004").keys() == saved(one / "checkpoints/step-00000004").keys()
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [load(tmp_path / name, dtype=torch.float32) for name in ("out-one", "out-two")]
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    for run, world, mesh, size in ((two, 1, "fsdp=1", "2"), (one, 2, "fsdp=2", "1")):
        shutil.rmtree(run / "checkpoints/step-00000004")
        train_on(world, "--resume", run, "--mesh", mesh, "--batch-size", size, "--export-hf", run / "out")
        same()
