"""The cross entropy kernel on a GPU: right, repeatable, and as good a training step as torch's own loss."""

import copy
import statistics

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph.kernels.loss.cross_entropy import cross_entropy_
from stepgraph.kernels.loss.tokens import token_gradient_, token_stats
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import configured

DEVICE = "cuda"
IGNORE = -100
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows, V, dtype, scale=4.0):
    logits = (torch.randn(rows, V, device=DEVICE) * scale).to(dtype)
    targets = torch.randint(V, (rows,), device=DEVICE)
    targets[::5] = IGNORE
    return logits, targets


def truth(logits, targets, grad, mean=True):
    """(loss, gradient) in float64 from torch's own cross entropy."""
    wide = logits.double().requires_grad_()
    loss = F.cross_entropy(wide, targets, reduction="mean" if mean else "sum")
    (loss * grad).backward()
    return loss.detach(), wide.grad


def check(loss, slopes, logits, targets, grad, mean=True):
    expected, gradient = truth(logits, targets, grad, mean)
    assert loss.dtype == torch.float32 and slopes.dtype == logits.dtype
    # exp2 of v * log2(e) in fp32: |v| * 2^-24 is lost in v, up to about 100, and 2^-22 in the hardware's exp2.
    torch.testing.assert_close(loss.double(), expected, rtol=5e-6, atol=2e-5)
    rtol = max(torch.finfo(logits.dtype).eps, 5e-5)
    # A probability near 1 is off by some units of 2^-24, and so is its difference from the target's 1. Below half the
    # smallest subnormal of fp16, 2^-25, nothing is left of a softmax.
    row = grad.item() / (len(targets) if mean else 1)
    atol = max(2**-20 * row, 2**-25 if logits.dtype == torch.float16 else 0)
    torch.testing.assert_close(slopes.double(), gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 2, 33, 128, 1000, 4096, 8192, 8193, 16384, 50257, 128256, 262144])
def test_kernel(V, dtype):
    logits, targets = inputs(48, V, dtype)
    grad = torch.tensor(0.5, device=DEVICE)
    runs = [logits.clone() for _ in range(3)]
    losses = [cross_entropy_(run, targets, grad, True, IGNORE) for run in runs]
    check(losses[0], runs[0], logits, targets, grad)
    for run, loss in zip(runs, losses, strict=True):
        assert torch.equal(run, runs[0]) and torch.equal(loss, losses[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [33, 4096, 50257, 64128])
def test_kernels_of_a_shared_vocabulary(V, dtype):
    """This rank has columns up to V of 2 * V."""
    whole, targets = inputs(48, 2 * V, dtype)
    (_, gradient), logits = truth(whole, targets, 0.5), whole[:, :V].contiguous()
    column = torch.where(targets < V, targets, -1)
    log_sum = token_stats(logits, column, 1.0, -2)[1]
    assert torch.equal(token_stats(logits, column, 1.0, -2)[1], log_sum)
    torch.testing.assert_close(log_sum, logits.double().logsumexp(1).float(), rtol=5e-6, atol=2e-5)
    slope = (targets != IGNORE).float() * -0.5 / (targets != IGNORE).sum()
    none, of_all = torch.zeros_like(slope), whole.double().logsumexp(1).float()
    token_gradient_(logits, column, of_all, none, slope, none, none, none, 1.0, -2)
    rtol = max(torch.finfo(dtype).eps, 5e-5)
    atol = max(2**-20 * 0.5 / len(targets), 2**-25 if dtype == torch.float16 else 0)
    torch.testing.assert_close(logits.double(), gradient[:, :V], rtol=rtol, atol=atol)


@pytest.mark.parametrize("V", [100, 20000])
def test_sum_rows_apart_and_minus_infinity(V):
    """A vocabulary padded in memory, masked logits; what lies next to the rows stays as it is."""
    padded, targets = inputs(16, V + 24, torch.bfloat16)
    targets.clamp_(max=V - 1)
    padded[:, V // 2 : V // 2 + 7] = -float("inf")
    targets = torch.where((targets >= V // 2) & (targets < V // 2 + 7), IGNORE, targets)
    padded[3, : V - 1], targets[3] = -float("inf"), V - 1
    before, grad = padded.clone(), torch.tensor(1.0, device=DEVICE)
    loss = cross_entropy_(padded[:, :V], targets, grad, False, IGNORE)
    check(loss, padded[:, :V], before[:, :V], targets, grad, mean=False)
    assert torch.equal(padded[:, V:], before[:, V:])


def test_no_row_counts_and_targets_out_of_range():
    logits, targets = inputs(4, 300, torch.float32)
    grad = torch.tensor(1.0, device=DEVICE)
    slopes = logits.clone()
    assert cross_entropy_(slopes, torch.full_like(targets, IGNORE), grad, True, IGNORE).isnan()
    assert not slopes.any()
    targets[:] = 1
    targets[2] = 300
    assert cross_entropy_(logits, targets, grad, True, IGNORE).isnan()


def test_more_elements_than_an_int32_counts():
    V = 131072
    rows = 2**31 // V + 8
    if torch.cuda.mem_get_info()[0] < 3 * rows * V:
        pytest.skip("needs 7 GB of free GPU memory")
    logits = torch.zeros(rows, V, device=DEVICE, dtype=torch.bfloat16)
    last = torch.randn(V, device=DEVICE).bfloat16()
    logits[-1] = last
    targets = torch.full((rows,), 7, device=DEVICE)
    grad = torch.tensor(1.0, device=DEVICE)
    cross_entropy_(logits, targets, grad, False, IGNORE)
    _, gradient = truth(last[None], targets[-1:], grad)
    torch.testing.assert_close(logits[-1].double(), gradient[0], rtol=2**-8, atol=2**-20)


def test_opcheck():
    logits, targets = inputs(6, 100, torch.bfloat16)
    torch.library.opcheck(cross_entropy_, (logits, targets, torch.tensor(1.0, device=DEVICE), True, IGNORE))


CONFIG = Llama3Config(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=512, vocab_size=4096, max_seq_len=256)


def llama(dtype):
    return Llama3(CONFIG).to(DEVICE, dtype)


def tokens(n=3, batch=4, length=256):
    ids = torch.randint(CONFIG.vocab_size, (n, batch, length + 1), device=DEVICE)
    return [{"tokens": i[:, :-1].contiguous(), "targets": i[:, 1:].contiguous()} for i in ids]


def autocast_loss(model, batch):
    with torch.autocast(DEVICE, torch.bfloat16):
        return next_token_loss(model, batch)


def captured(model, loss_fn, batch, *, fused, optimizer=None, accumulate=1):
    passes = configured("default", inductor="off", cuda_graph=False)
    return stepgraph.capture(
        model, loss_fn, batch, optimizer, accumulate=accumulate, passes=passes, disable=() if fused else ("fuse_loss",)
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "loss_fn", "tolerance"),
    # The two differ in the last bit of the logits' gradient, which the layers below carry on in their dtype.
    [
        (torch.float32, next_token_loss, 1e-4),
        (torch.bfloat16, next_token_loss, 3e-2),
        (torch.float32, autocast_loss, 3e-2),
    ],
)
def test_gradients_of_a_llama(deterministic, dtype, loss_fn, tolerance, accumulate):
    model, batch = llama(dtype), tokens(1)[0]
    grads, losses = [], []
    for fused in (False, True, True):
        twin = copy.deepcopy(model)
        step = captured(twin, loss_fn, batch, fused=fused, accumulate=accumulate)
        losses.append(step(batch).clone())
        grads.append({name: param.grad for name, param in twin.named_parameters()})
        if fused:
            report = next(r for r in step.report if r.name == "fuse_loss")
            assert (report.matched, report.changed, report.notes) == (1, 1, [])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for name, grad in grads[0].items():
        error = (grads[1][name].double() - grad.double()).norm() / grad.double().norm()
        assert error < tolerance, f"{name}: relative error {error:.1e}"
        assert torch.equal(grads[1][name], grads[2][name]), f"{name}: two runs differ"


@pytest.mark.parametrize("passes", ["without Inductor", "default"])
def test_a_llama_trains_as_without(deterministic, passes):
    """Losses of 20 steps in bf16; "default" is with Inductor around the kernel and all of it in a CUDA graph."""
    model, batches, losses = llama(torch.bfloat16), tokens(), {}
    chosen = configured("default", inductor="full" if passes == "default" else "off", cuda_graph=passes == "default")
    for disable in (("fuse_loss",), ()):
        twin = copy.deepcopy(model)
        optimizer = stepgraph.MasterAdamW(twin.parameters(), lr=1e-3)
        step = stepgraph.capture(
            twin, next_token_loss, batches[0], optimizer, max_grad_norm=1.0, passes=chosen, disable=disable
        )
        losses[disable] = [step(batches[i % len(batches)]).item() for i in range(20)]
    without, fused = losses.values()
    assert fused[-1] < fused[0] - 0.5
    # One update moves by the same sizes with signs that may differ where a gradient is near zero: 1e-3 in the loss.
    assert max(abs(a - b) / a for a, b in zip(without, fused, strict=True)) < 1e-2
    assert statistics.fmean(abs(a - b) / a for a, b in zip(without, fused, strict=True)) < 3e-3


def test_peak_memory_is_lower():
    """Logits (bf16) of 8 x 1024 rows of 32768: without the pass, fp32 logits, softmax and gradient come next to
    them."""
    config = Llama3Config(dim=128, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=256, vocab_size=32768, max_seq_len=1024)
    ids = torch.randint(config.vocab_size, (8, 1024), device=DEVICE)
    batch, peaks = {"tokens": ids, "targets": ids}, []
    for fused in (False, True):
        model = Llama3(config).to(DEVICE, torch.bfloat16)
        step = captured(model, next_token_loss, batch, fused=fused)
        step(batch)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(batch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, step
    size = ids.numel() * config.vocab_size * 2
    assert peaks[0] - peaks[1] > 2 * size, f"{peaks[0] / size:.1f} and {peaks[1] / size:.1f} times the logits"
