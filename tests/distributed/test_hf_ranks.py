"""Hugging Face weights of a parallel model: each rank reads its parts, rank 0 writes what transformers reads."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from stepgraph.config import hf_weights
from stepgraph.config.build import build_model
from stepgraph.config.hf_weights import load_hf, save_hf
from stepgraph.config.train import TrainConfig
from stepgraph.models import Llama3
from stepgraph.parallel import local_parts
from tests.distributed.ranks import TINY, full, make_mesh, on_ranks, parallel_model, whole_model

TIED = replace(TINY, tie_embeddings=True)
SHARD_BYTES = 40_000  # several files, and tensors larger than one


def exported(folder, text, config, **options):
    save_hf(parallel_model(make_mesh(text), config, **options), folder, max_shard_bytes=SHARD_BYTES)


def imported(folder, text, config):
    """The weights that a mesh reads are those of one process, and it does not read more than its part."""
    mesh = make_mesh(text)
    model = parallel_model(mesh, config)
    for part in local_parts(model).values():
        part.tensor.fill_(torch.nan)
    model.rope_cos.fill_(torch.nan)
    asked = []
    with patch.object(hf_weights, "safe_open", lambda *a, **k: _Watched(safe_open(*a, **k), asked)):
        load_hf(model, folder)
    expected, found = whole_model(config), dict(model.named_parameters())
    for name, param in expected.named_parameters():
        assert torch.equal(full(model, name, found[name].detach()), param), name
    assert torch.equal(model.rope_cos, expected.rope_cos)
    assert sum(asked) == sum(part.tensor.numel() for part in local_parts(model).values())


class _Watched:
    """A safetensors file that notes how many elements are read."""

    def __init__(self, file, asked):
        self.file, self.asked = file, asked

    def __enter__(self):
        self.file = self.file.__enter__()
        return self

    def __exit__(self, *failure):
        return self.file.__exit__(*failure)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return _WatchedSlice(self.file.get_slice(name), self.asked)


class _WatchedSlice:
    def __init__(self, inner, asked):
        self.inner, self.asked = inner, asked
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, region):
        tensor = self.inner[region]
        self.asked.append(tensor.numel())
        return tensor


@pytest.mark.parametrize("config", [TINY, pytest.param(TIED, marks=pytest.mark.slow)], ids=["plain", "tied"])
def test_two_ranks_write_and_read(tmp_path, config):
    """What fsdp=2 writes, transformers, one process and tp=2 read bit for bit; and what tp=2 writes is the same."""
    on_ranks(2, _both_ways, str(tmp_path), config)
    expected = whole_model(config)
    alone = Llama3(config)
    load_hf(alone, tmp_path / "fsdp")
    for (name, ours), theirs in zip(alone.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    files = sorted(path.name for path in (tmp_path / "fsdp").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "tp").iterdir())
    assert "model.safetensors.index.json" in files and "config.json" in files and len(files) > 4
    for name in files:
        assert (tmp_path / "fsdp" / name).read_bytes() == (tmp_path / "tp" / name).read_bytes(), name
    # The same bytes as one process writes.
    save_hf(expected, tmp_path / "one", max_shard_bytes=SHARD_BYTES)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "fsdp" / name).read_bytes(), name

    hf, info = LlamaForCausalLM.from_pretrained(tmp_path / "fsdp", output_loading_info=True, dtype=torch.float32)
    assert not any(info.values())
    tokens = torch.randint(config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = hf(tokens).logits
        torch.testing.assert_close(expected(tokens), logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())


def _both_ways(folder, config):
    exported(Path(folder) / "fsdp", "fsdp=2", config)
    imported(Path(folder) / "fsdp", "tp=2", config)
    exported(Path(folder) / "tp", "tp=2", config)
    imported(Path(folder) / "tp", "fsdp=2", config)


@pytest.mark.slow
def test_four_ranks_write_and_read(tmp_path):
    save_hf(whole_model(), tmp_path / "one", max_shard_bytes=SHARD_BYTES)
    on_ranks(4, _four, str(tmp_path))
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "four" / path.name).read_bytes(), path.name


def _four(folder):
    imported(Path(folder) / "one", "fsdp=2,tp=2", TINY)
    exported(Path(folder) / "four", "fsdp=2,tp=2", TINY)
    imported(Path(folder) / "four", "hsdp=2x2", TINY)


def test_bf16_and_refusals(tmp_path):
    on_ranks(2, _bf16_and_refusals, str(tmp_path))
    tensors = load_file(tmp_path / "bf16/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "bf16/config.json").read_text())["torch_dtype"] == "bfloat16"
    alone = Llama3(TINY).bfloat16()
    load_hf(alone, tmp_path / "bf16")
    for (name, ours), theirs in zip(alone.named_parameters(), whole_model().parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), name


def _bf16_and_refusals(text):
    folder, mesh = Path(text), make_mesh("fsdp=2")
    save_hf(parallel_model(mesh, param_dtype=torch.bfloat16), folder / "bf16")
    # What a run starts from: shards in fp32, of the values that bf16 has, whatever the file holds.
    save_hf(parallel_model(mesh), folder / "fp32")
    config = TrainConfig(preset="tiny", model=TINY, mesh="fsdp=2", precision="bf16", init_from_hf=folder / "fp32")
    started = build_model(config, torch.device("cpu"), mesh)
    for name, param in whole_model().named_parameters():
        stored = dict(started.named_parameters())[name].detach()
        assert stored.dtype == torch.float32
        assert torch.equal(full(started, name, stored), param.bfloat16().float()), name

    # An error on one rank is one on every rank, and nothing is written.
    model = parallel_model(mesh)
    before = [param.detach().to_local().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"already holds a checkpoint \(config\.json\); use a new folder"):
        save_hf(model, folder / "bf16")
    missing = folder / ("bf16" if dist.get_rank() == 0 else "nowhere")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_hf(model, missing)
    with (
        patch.object(hf_weights, "save_file", side_effect=OSError(28, "No space left on device")),
        pytest.raises(OSError, match="No space left"),
    ):
        save_hf(model, folder / "full")
    assert not (folder / "full/config.json").exists()
    assert all(map(torch.equal, before, (param.detach().to_local() for param in model.parameters())))
