"""``stepgraph train --mesh``, as a user starts it: ranks as processes, one run folder, checkpoints for any mesh."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import stepgraph
from stepgraph import cli
from stepgraph.parallel import layouts
from stepgraph.train.checkpoint.checkpointer import Checkpointer
from tests.distributed.ranks import TINY, full, make_mesh, on_processes, on_ranks, parallel_model

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
TINY_RUN = [
    *(word for name in SIZES for word in (f"--model.{name.replace('_', '-')}", str(getattr(TINY, name)))),
    *("--model.vocab-size", "330", "--seq-len", "32", "--val-batches", "2", "--device", "cpu", "--steps", "6"),
    *("--warmup-steps", "1", "--val-every", "3", "--checkpoint-every", "3", "--keep-checkpoints", "9"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """One text of many short documents, so that ranks have their own."""
    folder = Path(os.__file__).parent
    text = "<|endoftext|>".join(
        (folder / f"{name}.py").read_text()[:4000] for name in ("ast", "inspect", "typing", "os")
    )
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("<|endoftext|>".join(text[i : i + 500] for i in range(0, len(text), 500)))
    return path


def train(*words, cwd):
    """The command as a user types it: (exit status, stdout, stderr)."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(stepgraph.__file__).parents[1])}
    command = [sys.executable, "-m", "stepgraph", "train", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def train_on(world, *words):
    """The same command on ``world`` ranks that torchrun might have started, without its start-up time."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    on_processes(world, _train_rank, (world, port, ["train", *map(str, words)]))


def _train_rank(rank, world, port, words):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0


def records(folder, *names):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], *(r[n] for n in names)) for r in lines if all(n in r for n in names)]


def saved(path):
    """Every tensor of a checkpoint, whole, read by torch itself."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
    return tensors


@pytest.mark.slow
def test_nproc_starts_the_ranks_and_one_speaks_for_all(corpus, tmp_path):
    words = [*TINY_RUN, "--data", corpus, "--batch-size", "2", "--out", tmp_path / "run", "--nproc", "2"]
    status, out, err = train(*words, "--mesh", "fsdp=2", cwd=tmp_path)
    assert status == 0, err
    assert out.count("run folder") == 1 and out.count("step 6/6") == 1 and "mesh fsdp=2 of 2 ranks" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["tokens"] == 6 * 2 * 2 * 32 and summary["status"] == "finished"
    assert [step for step, _ in records(tmp_path / "run", "loss")] == list(range(1, 7))


@pytest.mark.long
def test_an_error_of_use_that_the_capture_finds_is_one_line(corpus, tmp_path):
    words = [*TINY_RUN, "--data", corpus, "--batch-size", "2", "--mesh", "fsdp=2", "--nproc", "2"]
    status, _, err = train(*words, "--memory", "budget=0.0000001GiB", "--out", tmp_path / "run", cwd=tmp_path)
    err = err.replace("loading torch\n", "")  # said where it takes long, by each process
    assert status == 2 and err.startswith("error: memory budget of 0.10 KiB cannot be met") and err.count("\n") == 1
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_resume_on_the_same_mesh_and_on_another(corpus, tmp_path):
    run, last = tmp_path / "run", tmp_path / "run/checkpoints/step-00000006"
    train_on(2, *TINY_RUN, "--data", corpus, "--batch-size", "2", "--mesh", "fsdp=2", "--out", run)
    losses = records(run, "loss", "grad_norm")

    # The same mesh goes on from step 3 and comes to the same end, bit for bit.
    last.rename(tmp_path / "away")
    train_on(2, "--resume", run)
    assert records(run, "loss", "grad_norm") == losses
    for name in ("state.json", "rank-00000.json", "rank-00001.json"):
        assert (tmp_path / "away" / name).read_bytes() == (last / name).read_bytes(), name
    (before, after) = saved(tmp_path / "away"), saved(last)
    assert before.keys() == after.keys() and len(before) > 40
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())

    # Another mesh goes on from the same weights, optimizer and row: two ranks of tp read what the two of fsdp shared.
    positions = [json.loads((last / f"rank-0000{rank}.json").read_text())["loader"] for rank in (0, 1)]
    assert positions[0] == positions[1]
    shutil.rmtree(last)
    train_on(2, "--resume", run, "--mesh", "tp=2", "--batch-size", "4", "--steps", "7")
    resumed = records(run, "loss")
    assert [step for step, _ in resumed] == list(range(1, 8))
    # Step 4 sees the same weights and rows; then AdamW's first steps turn other rounding into other updates.
    for (_, loss), (_, expected, _), rel in zip(resumed[3:6], losses[3:], (1e-5, 1e-2, 1e-2), strict=True):
        assert loss == pytest.approx(expected, rel=rel)


@pytest.mark.slow
def test_a_mesh_trains_as_one_process_does(corpus, tmp_path):
    """Two ranks of tp read what one process reads, and start from the same weights, used in bf16."""
    base = [*TINY_RUN, "--data", corpus, "--batch-size", "4", "--steps", "3", "--precision", "bf16"]
    base += ["--document-mask", "on"]
    train_on(2, *base, "--mesh", "tp=2", "--out", tmp_path / "tp", "--export-hf", tmp_path / "hf")
    train_on(1, *base, "--mesh", "fsdp=1", "--out", tmp_path / "one")
    with pytest.raises(SystemExit):
        cli.main(["train", *map(str, base), "--out", str(tmp_path / "alone")])
    expected, one, tp = (records(tmp_path / name, "loss") for name in ("alone", "one", "tp"))
    assert one[0] == expected[0]
    for curve in (one, tp):
        assert [loss for _, loss in curve] == [pytest.approx(loss, rel=2e-3) for _, loss in expected]
    # Another mesh goes on from the weights that the first wrote for others.
    words = ["--mesh", "fsdp=2", "--init-from-hf", tmp_path / "hf", "--out", tmp_path / "more", "--steps", "2"]
    train_on(2, *base, *words)
    assert records(tmp_path / "more", "loss")[0][1] < tp[0][1]


@pytest.mark.slow
def test_a_checkpoint_is_read_on_another_mesh_bit_for_bit(tmp_path):
    on_ranks(4, _save, str(tmp_path), "fsdp=4")
    on_ranks(4, _load, str(tmp_path), "fsdp=2,tp=2")
    on_ranks(1, _load, str(tmp_path), "fsdp=1")


def _state(text):
    mesh = make_mesh(text)
    model = parallel_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, Checkpointer(Path("."), mesh=text)


def _save(folder, text):
    model, optimizer, checkpointer = _state(text)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        param.grad.to_local().normal_(generator=generator)
    optimizer.step()
    checkpointer.folder = Path(folder) / "checkpoints"
    checkpointer.save(1, {"model": model, "optimizer": optimizer})
    whole = {}
    for name, param in model.named_parameters():
        whole[name] = full(model, name, param.detach())
        whole[f"{name}.exp_avg"] = full(model, name, optimizer.state[param]["exp_avg"])
    if torch.distributed.get_rank() == 0:
        torch.save(whole, Path(folder) / "whole.pt")


def _load(folder, text):
    model, optimizer, checkpointer = _state(text)
    path = Path(folder) / "checkpoints" / "step-00000001"
    assert not checkpointer.is_of_this_mesh(path)
    checkpointer.load(path, {"model": model, "optimizer": optimizer}, rng=False)
    expected = torch.load(Path(folder) / "whole.pt")
    for name, param in model.named_parameters():
        assert torch.equal(full(model, name, param.detach()), expected[name]), name
        state = optimizer.state[param]
        assert torch.equal(full(model, name, state["exp_avg"]), expected[f"{name}.exp_avg"]), name
        for tensor in (param.detach(), state["exp_avg"]):
            local, own = tensor.to_local(), layouts(model)[name].own(tensor.to_local())
            assert not local[own.shape[0] :].any(), "padding stays zero"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "fsdp=4"], "mesh fsdp=4 has 4 ranks and this process is alone: start 4 with torchrun"),
        (["--nproc", "2"], "nproc=2 has no mesh: add --mesh fsdp=2"),
        (
            ["--mesh", "fsdp=4", "--nproc", "2"],
            "mesh fsdp=4 has 4 ranks and there are 2 processes: try the mesh fsdp=2",
        ),
        (["--max-restarts", "1"], "max_restarts=1 restarts the ranks of --nproc: add --nproc, or pass it to torchrun"),
        (["--mesh", "fsd=4"], "unknown mesh axis 'fsd': did you mean 'fsdp'?"),
        (["--mesh", "fsdp=4,ep=2"], "mesh fsdp=4,ep=2 has ep and the model has no experts; drop ep=2"),
        (["--mesh", "tp=4"], "tp=4 does not divide n_heads=6; try tp=1"),
        (["--mesh", "tp=3", "--seq-len", "64"], "tp=3 does not divide ffn_dim=896; try tp=1"),
    ],
)
def test_what_is_refused(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--device", "cpu", "--out", str(tmp_path / "run"), *words])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
