"""The optimizer's state in page-locked memory, inside CUDA graphs: the same bits and a lower peak."""

import gc

import pytest
import torch

import stepgraph
from stepgraph.kernels.offload import page_locked
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions

CONFIG = Llama3Config(dim=1024, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=3584, vocab_size=8192, max_seq_len=256)
MASTER = stepgraph.MasterAdamW
FUSED = torch.optim.AdamW


def trained(kind, offload, steps=4, accumulate=1, **options):
    """(losses and tensors, bytes at the peak of the step, the step, its optimizer): later steps replay."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = Llama3(CONFIG).to("cuda", torch.bfloat16 if kind is MASTER else torch.float32)
    ids = torch.randint(CONFIG.vocab_size, (2, 257), device="cuda")
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    optimizer = kind(model.parameters(), lr=1e-3, **({} if kind is MASTER else {"fused": options.pop("fused", True)}))
    given = StepOptions(offload_optimizer=offload, **options)
    shared = {"max_grad_norm": 1.0, "accumulate": accumulate, "passes": given}
    step = stepgraph.capture(model, next_token_loss, batch, optimizer, **shared)
    torch.cuda.reset_peak_memory_stats()
    losses = [step(batch).clone() for _ in range(steps)]
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    state = [v for slots in optimizer.state.values() for v in slots.values() if isinstance(v, torch.Tensor)]
    tensors = [t.detach().cpu().clone() for t in (*losses, *model.parameters(), *state)]
    return tensors, peak, step, optimizer, batch


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("inductor", ["off", "full"])
@pytest.mark.parametrize("kind", [MASTER, FUSED])
def test_the_bits_are_the_same_and_the_peak_is_lower(deterministic, kind, inductor, cuda_graph):
    options = {"passes": "exact" if inductor == "off" else "default", "inductor": inductor, "cuda_graph": cuda_graph}
    plain, most = trained(kind, False, **options)[:2]  # the step would hold its memory
    found, peak, step, optimizer, _ = trained(kind, True, **options)
    assert all(map(torch.equal, plain, found))
    held = [v for slots in optimizer.state.values() for k, v in slots.items() if k != "step"]
    assert all(v.device.type == "cpu" and v.is_pinned() for v in held)
    size = sum(v.nbytes for v in held)
    assert peak < most - 0.3 * size, (peak, most, size)
    if cuda_graph:
        recording = next(report for report in step.report if report.name == "cuda_graph")
        assert recording.summary.startswith("1 CUDA graph, 0 nodes on the host")


def test_with_accumulation(deterministic):
    plain, *_ = trained(MASTER, False, accumulate=2)
    found, _, step, *_ = trained(MASTER, True, accumulate=2)
    assert all(map(torch.equal, plain, found))
    reports = {(report.name, report.graph): report for report in step.report}
    assert reports["cuda_graph", "update"].summary.startswith("1 CUDA graph, 0 nodes on the host")


def test_an_optimizers_own_step_is_offloaded():
    plain, *_ = trained(FUSED, False, passes="exact", fused=False)
    found, *_ = trained(FUSED, True, passes="exact", fused=False)
    assert all(map(torch.equal, plain, found))


def test_verify_and_checkpoints_with_and_without_it(deterministic):
    """Eager's step has the state on the GPU; a loaded state goes to the host again, or back to the GPU."""
    _, _, step, optimizer, batch = trained(MASTER, True, steps=3, passes="exact")
    assert step.verify(batch).bitwise
    saved = {key: [v.clone() for v in slots.values()] for key, slots in optimizer.state_dict()["state"].items()}
    step(batch)
    now = optimizer.state_dict()["state"][0].values()
    assert not any(map(torch.equal, now, saved[0]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert step.verify(batch).bitwise
    model = step.spec.model
    again = stepgraph.capture(model, next_token_loss, batch, optimizer, passes="exact", max_grad_norm=1.0)
    assert all(v.is_cuda for slots in optimizer.state.values() for v in slots.values())
    assert again.verify(batch).bitwise


def test_page_locked_memory_has_its_size_and_is_given_back():
    memory = page_locked(3 * 2**20 + 7)
    view = memory[16:64].view(torch.float32)
    del memory
    assert view.is_pinned() and view.untyped_storage().nbytes() == 3 * 2**20 + 7
    there = torch.empty(12, device="cuda").copy_(view, non_blocking=True)
    assert not there.any()
    address = view.untyped_storage().data_ptr()
    del view
    gc.collect()
    other = page_locked(3 * 2**20 + 7)
    assert other.is_pinned() and address


def test_a_peak_moves_as_much_state_as_it_needs(deterministic):
    """Some of it; a second form of the step finds it there, and a step without the peak takes it back."""
    plain, most = trained(FUSED, False, passes="exact", inductor="off")[:2]
    full = trained(FUSED, False, passes="exact", inductor="off", memory="full")[1]
    asked = full - 0.3 * (most - full) - 0.5 * 2**30
    options = {"passes": "exact", "inductor": "off", "memory": f"peak={asked / 2**30:.3f}GiB"}
    found, peak, step, optimizer, batch = trained(FUSED, False, **options)
    assert all(map(torch.equal, plain, found)) and peak < 1.03 * asked
    report = next(report for report in step.report if report.name == "offload_optimizer")
    held = [v for slots in optimizer.state.values() for k, v in slots.items() if k != "step"]
    away = sum(v.device.type == "cpu" and v.is_pinned() for v in held)
    assert 0 < away < len(held) and report.summary.startswith(f"{away} of {len(held)} tensors")
    assert any(note.startswith("host memory: ") for note in report.notes)
    assert step.verify(batch).bitwise
    step({key: value[:, :128].contiguous() for key, value in batch.items()})
    assert sum(v.device.type == "cpu" for s in optimizer.state.values() for v in s.values()) == away
    again = stepgraph.capture(step.spec.model, next_token_loss, batch, optimizer, passes="exact", max_grad_norm=1.0)
    assert all(v.is_cuda for slots in optimizer.state.values() for v in slots.values())
    assert again.verify(batch).bitwise


def test_a_share_of_the_gpus_memory_is_a_peak():
    step = trained(FUSED, False, steps=1, passes="exact", inductor="off", memory="peak=90%")[2]
    assert next(report for report in step.report if report.name == "fit_memory").changed == 0
