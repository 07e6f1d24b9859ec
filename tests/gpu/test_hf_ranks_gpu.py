"""Hugging Face models over two GPUs, with NCCL and in bf16: as `tests/distributed/test_hf_trainer_ranks.py`."""

import gc
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from stepgraph.parallel import leave
from tests.distributed.hf_ranks import check_ranks, check_what_ranks_saved, launched_as, one_process
from tests.distributed.ranks import on_processes

#: (model, GraphTrainer's own options, TrainingArguments').
CASES = {
    "qwen": ("qwen3", {}, {"fsdp": True}),
    "qwen replicas": ("qwen3", {}, {}),
    "llama": ("llama3.2", {}, {"fsdp": True}),
    "gemma": ("gemma3", {}, {"fsdp": True}),
    "experts sharded": ("qwen3-moe", {}, {"fsdp": True}),
    "experts over ranks": ("qwen3-moe", {"mesh": "fsdp=2,ep=2"}, {}),
}
#: Losses of bf16 that is rounded in other places.
TOLERANCE = 1e-2


def on_two_gpus(function, *args):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    on_processes(2, _rank, (port, function, args))


def _rank(rank, port, function, args):
    launched_as(rank, 2, port)
    _repeatable()
    try:
        function(*args)
        gc.collect()
        dist.destroy_process_group()  # ends though the trainers have recorded NCCL's kernels
    except BaseException:
        traceback.print_exc()
        leave(1)


def on_one_gpu(function, *args):
    """In a process that sees one GPU: ``Trainer`` would wrap the model in ``DataParallel`` where it sees two. The
    process has to start with the variable, since its imports may ask the driver for GPUs, and the server that forks
    ranks must not."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = (seen or "0").split(",")[0]
    try:
        torch.multiprocessing.start_processes(_alone, (function, args), nprocs=1, start_method="spawn")
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES") if seen is None else os.environ.update(CUDA_VISIBLE_DEVICES=seen)


def _alone(_, function, args):
    assert torch.cuda.device_count() == 1
    _repeatable()
    function(*args)


def _repeatable():
    torch.use_deterministic_algorithms(True, warn_only=True)


def _options(name, exact):
    """Options of `build` and of ``TrainingArguments``. Grouped products of fp32 weights cannot be traced: experts
    train in bf16 alone, others with master weights in fp32."""
    experts = name == "qwen3-moe"
    shape = {"scale": 8, "attn_implementation": "eager" if exact else "sdpa"}
    return shape | ({"dtype": torch.bfloat16} if experts else {}), {"use_cpu": False, "bf16": not experts}


@pytest.mark.parametrize("passes", ["exact", "default"])
@pytest.mark.parametrize("case", CASES)
def test_models_over_two_gpus(tmp_path, case, passes):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    name, own, options = CASES[case]
    shape, everywhere = _options(name, passes == "exact")
    on_one_gpu(_before, tmp_path, name, shape, everywhere)
    on_two_gpus(_ranks, tmp_path, name, own | {"passes": passes}, shape, everywhere | options)
    on_one_gpu(_after, tmp_path, name, shape, everywhere)


def _before(folder, name, shape, options):
    one_process(folder, name, shape, **options)


def _ranks(folder, name, own, shape, options):
    check_ranks(folder, name, own, shape, TOLERANCE, **options)


def _after(folder, name, shape, options):
    check_what_ranks_saved(folder, name, shape, TOLERANCE, **options)
