"""Every optimizer on a GPU against eager's default: the fused kernels bit for bit, the others up to rounding.

Formulas written out differ from eager's kernels in the last bits: eager's foreach operators multiply and add in another
order. Each step starts both from the same state, so that one update is compared and not the divergence of a run.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph

DEVICE = torch.device("cuda")
LR = 2.0**-7  # the same number in fp32, in which the fused kernels read it


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.tall = nn.Linear(64, 192), nn.Linear(192, 32)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.tall(self.wide(x).tanh()) * self.scale.exp()


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def of(kind, **options):
    return lambda model: [kind(model.parameters(), **{"lr": LR, **options})]


def muon_and_adamw(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(rest, lr=LR, fused=True)]


FUSED = {
    "adamw": of(torch.optim.AdamW, fused=True),
    "adam": of(torch.optim.Adam, fused=True, weight_decay=0.1),
    "sgd": of(torch.optim.SGD, fused=True, momentum=0.9, weight_decay=0.1),
}
OTHERS = {
    "adamw": of(torch.optim.AdamW, weight_decay=0.1),
    "adam": of(torch.optim.Adam, weight_decay=0.1),
    "sgd": of(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampened": of(torch.optim.SGD, momentum=0.9, dampening=0.3),
    "muon": muon_and_adamw,
    "adafactor": of(torch.optim.Adafactor, weight_decay=0.1),
} | {
    kind.__name__.lower(): of(kind, weight_decay=0.1)
    for kind in (
        *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad),
        *(torch.optim.Adadelta, torch.optim.Adamax),
    )
}
#: Otherwise it reads its step counts from the GPU.
OTHERS["asgd"] = of(torch.optim.ASGD, weight_decay=0.1, capturable=True)


def data(dtype, n=4):
    return [
        {"x": torch.randn(16, 64, dtype=dtype, device=DEVICE), "y": torch.randn(16, 32, dtype=dtype, device=DEVICE)}
        for _ in range(n)
    ]


def compare(make, dtype, passes, check):
    """Train a model eagerly and a captured one, which takes over the eager model's state before every step."""
    eager, captured = Mixed().to(DEVICE, dtype), Mixed().to(DEVICE, dtype)
    captured.load_state_dict(eager.state_dict())
    theirs, ours = make(eager), make(captured)
    batches = data(dtype)
    step = stepgraph.capture(captured, mse, batches[0], ours, max_grad_norm=0.3, passes=passes)
    for i, batch in enumerate(batches):
        mse(eager, batch).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.3)
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
        step(batch)
        with torch.no_grad():
            for a, b in zip(_state(eager, theirs), _state(captured, ours), strict=True):
                check(a, b, i)
                b.copy_(a)
    return step


def _state(model, optimizers):
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [*model.parameters(), *(t for state in states for _, t in sorted(state.items()))]


def equal(a, b, i):
    assert torch.equal(a, b), f"step {i}: differs by {(a.double() - b.double()).abs().max():.3g}"


def close(a, b, i):
    """Within some roundings of the dtype, relative to the tensor's largest element."""
    few = 16 * torch.finfo(a.dtype).eps
    torch.testing.assert_close(b, a, rtol=few, atol=few * float(a.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_fused_kernels_are_bitwise_eager(deterministic, make, dtype):
    compare(make, dtype, "exact", equal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_others_are_eager_up_to_rounding(deterministic, make, dtype):
    compare(make, dtype, "exact", close)


@pytest.mark.parametrize("name", ["muon", "adam", "sgd"])
def test_default_passes(name):
    compare((OTHERS | FUSED)[name], torch.float32, "default", near)


def near(a, b, i):
    """Compiled forward and backward round otherwise, and Muon's bf16 products make more of it."""
    torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2 * float(a.abs().max()))


def test_an_optimizer_that_reads_the_gpu_is_refused():
    with pytest.raises(stepgraph.CaptureError, match=r"ASGD.step .*create it with capturable=True"):
        compare(of(torch.optim.ASGD), torch.float32, "exact", equal)
