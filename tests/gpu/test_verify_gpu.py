"""`step.verify` on a GPU: CUDA's generators and what CUDA graphs write in place are put back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.passes import exact, get

OPTIMIZERS = {
    "none": lambda model: None,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "MasterAdamW": lambda model: stepgraph.MasterAdamW(model.parameters(), lr=0.01),
}


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pair(dtype=torch.float32, n=64):
    return {key: torch.randn(n, 128, device="cuda", dtype=dtype) for key in ("x", "y")}


def build(dtype=torch.float32):
    layers = [nn.Linear(128, 128), nn.Dropout(0.3), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 128)]
    return nn.Sequential(*layers).to("cuda", dtype)


def recorded():
    """The exact passes and CUDA graphs."""
    passes = exact()
    return passes if any(p.name == "cuda_graph" for p in passes) else [*passes, get("cuda_graph")]


def everything(model, optimizer):
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for entries in optimizer.state.values() if optimizer else ():
        tensors += entries.values()
    values = [(id(tensor), tensor.data_ptr(), tensor.detach().clone()) for tensor in tensors]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state()
    return values, generators


def assert_same(before, after):
    for (owner, place, value), (owner_now, place_now, value_now) in zip(before[0], after[0], strict=True):
        assert owner == owner_now and place == place_now and torch.equal(value, value_now)
    assert all(map(torch.equal, before[1], after[1]))


@pytest.mark.parametrize("graphs", [False, True], ids=["nodes", "CUDA graphs"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exact_is_bitwise_and_put_back(optimizer, accumulate, graphs, deterministic):
    dtype = torch.bfloat16 if optimizer == "MasterAdamW" else torch.float32
    model, batch = build(dtype), pair(dtype)
    made = OPTIMIZERS[optimizer](model)
    passes = recorded() if graphs else "exact"
    disable = () if graphs else ("cuda_graph",)
    step = stepgraph.capture(
        model, mse, batch, made, max_grad_norm=0.1, accumulate=accumulate, passes=passes, disable=disable
    )
    for _ in range(4):  # before the graphs are recorded, and after
        before = everything(model, made)
        report = step.verify(batch)
        assert report.bitwise, str(report)
        assert report.compared["random state"] == 2
        assert_same(before, everything(model, made))
        step(pair(dtype))


def test_training_goes_on_as_if_nothing_had_been(deterministic):
    """Dropout draws from CUDA's generator in replayed graphs: verifying between steps changes no later number."""
    twins = [build(), None]
    twins[1] = copy.deepcopy(twins[0])
    batches = [pair() for _ in range(5)]
    losses = []
    for model, verifies in zip(twins, (False, True), strict=True):
        step = stepgraph.capture(model, mse, batches[0], OPTIMIZERS["AdamW"](model), passes=recorded())
        torch.cuda.manual_seed(1)
        for batch in batches:
            if verifies:
                step.verify(batch)
            losses.append(step(batch))
    assert torch.equal(torch.stack(losses[:5]), torch.stack(losses[5:]))
    for a, b in zip(twins[0].state_dict().values(), twins[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_default_passes_are_close_and_located():
    """Inductor rounds differently: told with names, and the pass is named."""
    model, batch = build(), pair()
    model[1].p = 0.0  # Inductor draws other numbers
    step = stepgraph.capture(model, mse, batch, OPTIMIZERS["AdamW"](model), max_grad_norm=1.0)
    report = step.verify(batch, locate=True)
    assert report.close, str(report)
    assert report.bitwise or report.parted


def test_what_is_kept_is_kept_on_the_host():
    """Device memory beyond the steps themselves is that of a few tensors, not of a second model."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    optimizer = OPTIMIZERS["AdamW"](model)
    batch = {key: torch.randn(16, 2048, device="cuda") for key in ("x", "y")}
    step = stepgraph.capture(model, mse, batch, optimizer, passes="exact", disable=("cuda_graph",))
    step(batch)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert step.verify(batch).compared["parameter"] == 8
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 1.8 * size  # gradients, and what an update computes
