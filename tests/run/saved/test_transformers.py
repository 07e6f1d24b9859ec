"""The step of a Hugging Face model is loaded by another process, which runs no pass, and is eager's bit for bit."""

import copy

import pytest
import torch

import stepgraph
from tests.distributed.ranks import on_processes

VOCAB = 64


def tiny_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def loss_fn(model, batch):
    return model(**batch, use_cache=False).loss


def a_batch(seed):
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def start(folder):
    model = tiny_model()
    return stepgraph.capture(model, loss_fn, a_batch(0), adamw(model), passes="exact", saved=folder), model


def saves(_, folder):
    torch.set_num_threads(1)
    step, _ = start(folder)
    assert not step.saved.loaded and step.saved.kept and not step.saved.notes, step.saved


def loads(_, folder):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepgraph.lower.lowering.run_passes", None)
        step, model = start(folder)
    assert step.saved.loaded and not step.saved.notes, step.saved
    eager = copy.deepcopy(model)
    optimizer = adamw(eager)
    for seed in range(3):
        expected = loss_fn(eager, a_batch(seed))
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(a_batch(seed)), expected.detach())
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_another_process_loads_the_step_of_a_hugging_face_model(tmp_path):
    pytest.importorskip("transformers")
    for work in (saves, loads):
        on_processes(1, work, (tmp_path,))


@pytest.mark.long
def test_a_process_with_other_hashes_loads_it_too(tmp_path):
    """Python's hashes of strings differ from one interpreter to the next."""
    pytest.importorskip("transformers")
    for work in (saves, loads):
        torch.multiprocessing.start_processes(work, (tmp_path,), start_method="spawn")
