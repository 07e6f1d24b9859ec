"""Several lengths of one step on a GPU: their CUDA graphs take turns, and pieces for any length serve."""

import copy
import itertools

import pytest
import torch

import stepgraph
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions
from stepgraph.run import forms

DEVICE, VOCAB = "cuda", 512


def llama(layers=4, dim=256):
    config = Llama3Config(
        dim=dim, n_layers=layers, n_heads=4, n_kv_heads=2, ffn_dim=3 * dim, vocab_size=VOCAB, max_seq_len=4096
    )
    return Llama3(config).to(DEVICE)


def batch_of(length, rows=4):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCAB, (rows, length + 1), generator=generator).to(DEVICE)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def trained(model, lengths, passes):
    """(losses, parameters, the step); eager where ``passes`` is None."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)
    step, losses = None, []
    if passes is not None:
        step = stepgraph.capture(model, next_token_loss, batch_of(lengths[0]), optimizer, passes=passes)
    for length in lengths:
        if step is None:
            loss = next_token_loss(model, batch_of(length))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = step(batch_of(length))
        losses.append(loss.item())
    return losses, list(model.parameters()), step


def check_close(ours, eager, rtol=2e-3):
    assert ours[0] == pytest.approx(eager[0], rel=rtol)
    for p, q in zip(ours[1], eager[1], strict=True):
        assert (p - q).norm() <= 1e-2 * q.norm()


def test_forms_that_take_turns_are_right(deterministic):
    """Every order of three lengths, each recorded and replayed among the others: bit for bit as without CUDA graphs."""
    model = llama(2)
    lengths = [n for order in itertools.permutations((128, 256, 192)) for n in order]
    losses, parameters, _ = trained(model, lengths, StepOptions("exact"))
    others, expected, _ = trained(model, lengths, StepOptions("exact", cuda_graph=False))
    assert losses == others
    assert all(torch.equal(p, q) for p, q in zip(parameters, expected, strict=True))


def test_forms_that_go_and_come_back(monkeypatch):
    monkeypatch.setattr(forms, "MAX_CAPTURES", 1)
    model = llama(2)
    lengths = [128, 128, 128, 192, 192, 192, 128, 128, 128]
    with pytest.warns(UserWarning, match="captured already"):
        ours = trained(model, lengths, StepOptions(inductor="off", norm="eager"))
    check_close(ours, trained(model, lengths, None))


def test_forms_share_the_memory_of_their_graphs():
    """Twelve lengths, each recorded, take little more than the longest; none is captured twice."""
    model = llama(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = stepgraph.capture(model, next_token_loss, batch_of(1024, 16), optimizer, passes=StepOptions(inductor="off"))
    for _ in range(3):
        step(batch_of(1024, 16))
    longest = torch.cuda.memory_reserved()
    lengths = range(1008, 832, -16)
    for length in [*lengths, *lengths, *lengths]:
        step(batch_of(length, 16))
    print(f"reserved: {longest >> 20} MiB with one length, {torch.cuda.memory_reserved() >> 20} with twelve")
    assert len(step._forms) == 12
    assert torch.cuda.memory_reserved() < 1.3 * longest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["auto", "kernel"])
def test_pieces_for_any_length(dtype, norm):
    model = llama(4).to(dtype)
    lengths = [256, 384, 200, 384, 77, 256, 512]  # the report is that of the last: all its pieces were compiled before
    ours = trained(model, lengths, StepOptions(any_length=True, norm=norm))
    if dtype == torch.float32:
        check_close(ours, trained(model, lengths, None))
    else:
        assert ours[0] == pytest.approx(trained(model, lengths, None)[0], rel=2e-2)
    report = next(r for r in ours[2].report if r.name == "inductor")
    print(report.line(), *report.notes, sep="\n")
    assert "reused" in report.summary
