"""Models that launch Triton kernels themselves: recorded, one CUDA graph, bitwise eager under the exact passes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.graph.facts import is_launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

STEPS, WIDTH, VOCAB = 6, 256, 384


@triton.jit
def _rms(x, w, y, rstd, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(values * values) / width + eps)
    tl.store(rstd + row, r)
    tl.store(y + row * width + at, values * r * tl.load(w + at, mask=inside, other=0.0), mask=inside)


@triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["width"])})
@triton.jit
def _rms_backward(g, x, w, rstd, parts, width, BLOCK: tl.constexpr):
    """Writes the gradient over ``g``, and each row's part of the weight's to ``parts``."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    grad = tl.load(g + row * width + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(rstd + row)
    scaled = grad * tl.load(w + at, mask=inside, other=0.0)
    mean = tl.sum(scaled * values) / width
    tl.store(parts + row * width + at, grad * values * r, mask=inside)
    tl.store(g + row * width + at, r * (scaled - values * r * r * mean), mask=inside)


@triton.jit
def _cross_entropy(logits, targets, losses, vocab, rows, BLOCK: tl.constexpr):
    """Writes the gradient of the mean loss over the logits."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < vocab
    values = tl.load(logits + row * vocab + at, mask=inside, other=-float("inf")).to(tl.float32)
    target = tl.load(targets + row)
    exps = tl.exp(values - tl.max(values))
    total = tl.sum(exps)
    tl.store(losses + row, tl.log(total) + tl.max(values) - tl.sum(tl.where(at == target, values, 0.0)))
    tl.store(logits + row * vocab + at, (exps / total - tl.where(at == target, 1.0, 0.0)) / rows, mask=inside)


@triton.autotune([triton.Config({"BLOCK": size}, num_warps=warps) for size, warps in [(256, 4), (1024, 8)]], key=["n"])
@triton.jit
def _silu(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, values / (1 + tl.exp(-values)), mask=at < n)


@triton.autotune([triton.Config({"BLOCK": size}) for size in (256, 1024)], key=["n"], restore_value=["g"])
@triton.jit
def _silu_backward(g, x, n, BLOCK: tl.constexpr):
    """Writes over ``g``: tuning restores it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-values))
    grad = tl.load(g + at, mask=at < n, other=0.0) * sigmoid * (1 + values * (1 - sigmoid))
    tl.store(g + at, grad, mask=at < n)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, rstd = torch.empty_like(rows), rows.new_empty(rows.shape[0], dtype=torch.float32)
        _rms[(rows.shape[0],)](rows, w, y, rstd, rows.shape[1], 1e-6, BLOCK=WIDTH, num_warps=2)
        ctx.save_for_backward(rows, w, rstd)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, g):
        rows, w, rstd = ctx.saved_tensors
        grad = g.reshape(rows.shape).clone()
        parts = torch.empty_like(rows, dtype=torch.float32)
        _rms_backward[(rows.shape[0],)](grad, rows, w, rstd, parts, rows.shape[1])
        return grad.view_as(g), parts.sum(0).to(w.dtype)


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        _silu[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        grad = g.clone(memory_format=torch.contiguous_format)
        _silu_backward[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](grad, x, x.numel())
        return grad


class CrossEntropy(torch.autograd.Function):
    """The gradient is made in forward, in the memory of the logits."""

    @staticmethod
    def forward(ctx, logits, targets):
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        block = triton.next_power_of_2(logits.shape[1])
        _cross_entropy[(logits.shape[0],)](logits, targets, losses, logits.shape[1], logits.shape[0], BLOCK=block)
        ctx.save_for_backward(logits.detach())
        return losses.mean()

    @staticmethod
    def backward(ctx, g):
        (grad,) = ctx.saved_tensors
        return grad * g, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(SiLU.apply(self.up(RMSNorm.apply(x, self.weight))))


class Model(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):
    return CrossEntropy.apply(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def batches(n=3):
    return [{key: torch.randint(VOCAB, (4, 64), device="cuda") for key in ("tokens", "targets")} for _ in range(n)]


def train(model, loss_fn, data, passes=None, steps=STEPS):
    """(losses, gradient norms, parameters, the captured step or None); without passes the model trains eagerly."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = passes and stepgraph.capture(model, loss_fn, data[0], optimizer, max_grad_norm=1.0, passes=passes)
    losses, norms = [], []
    for i in range(steps):
        batch = data[i % len(data)]
        if step:
            losses.append(step(batch).clone())
            norms.append(step.metrics["grad_norm"].clone())
            continue
        loss = loss_fn(model, batch)
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), torch.stack(norms), list(model.parameters()), step


def launches(step):
    return [node for node in step.nodes() if is_launch(node)]


def one_cuda_graph(step):
    report = next(report for report in step.report if report.name == "cuda_graph")
    assert report.summary == "1 CUDA graph, 0 nodes on the host", report.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_is_eager_bit_for_bit(deterministic, dtype):
    model, data = Model().to("cuda", dtype), batches()
    losses, norms, parameters, _ = train(model, loss_fn, data)
    ours, our_norms, our_parameters, step = train(model, loss_fn, data, "exact")
    assert torch.equal(losses, ours) and torch.equal(norms, our_norms)
    assert all(map(torch.equal, parameters, our_parameters))
    assert len(launches(step.graph)) == 4 * 4 + 1
    one_cuda_graph(step)


def test_a_first_step_that_tunes_is_right(deterministic):
    """The captured step runs first here: tuning at its first call neither spoils a value nor ends the CUDA graph."""
    for kernel in (_silu, _silu_backward):
        kernel.cache.clear()
    model, data = Model().to("cuda"), batches()
    ours, our_norms, _, step = train(model, loss_fn, data, "exact")
    losses, norms, *_ = train(model, loss_fn, data)
    assert torch.equal(losses, ours) and torch.equal(norms, our_norms)
    one_cuda_graph(step)


def test_default_passes_are_close():
    model, data = Model().to("cuda"), batches()
    losses, *_ = train(model, loss_fn, data)
    ours, _, _, step = train(model, loss_fn, data, "default")
    torch.testing.assert_close(ours, losses, rtol=1e-3, atol=1e-3)  # TF32 is off: fp32 sums in another order
    one_cuda_graph(step)


def test_torch_tells_what_a_kernel_writes():
    """By its analysis of the kernels' code."""
    step = trace_step(Model(n=1).cuda(), loss_fn, batches()[0], None).step
    written = {node.target.__name__: node.target.writes for node in launches(step)}
    assert written == {
        "_rms": (2, 3), "_silu": (1,), "_cross_entropy": (0, 2), "_silu_backward": (0,), "_rms_backward": (0, 4),
    }  # fmt: skip


def liger_qwen3():
    """A Qwen3 with Liger's rotation, norms and gated products; its losses read the number of labels on the host."""
    transformers = pytest.importorskip("transformers")
    liger = pytest.importorskip("liger_kernel.transformers")
    config = transformers.Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=VOCAB, use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).train()
    model.set_attn_implementation("eager")
    liger.apply_liger_kernel_to_qwen3(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=model
    )
    return model


def qwen3_loss(model, batch):
    logits = model(input_ids=batch["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())


def test_liger_is_eager_bit_for_bit(deterministic):
    model, data = liger_qwen3(), batches()
    losses, norms, parameters, _ = train(model, qwen3_loss, data)
    ours, our_norms, our_parameters, step = train(model, qwen3_loss, data, "exact")
    assert len(launches(step.graph)) >= 3 * 2 * 4  # layers, directions; at least two norms, a rotation and a product
    assert torch.equal(losses, ours) and torch.equal(norms, our_norms)
    assert all(map(torch.equal, parameters, our_parameters))


def test_liger_under_default_passes_is_close():
    model, data = liger_qwen3(), batches()
    losses, *_ = train(model, qwen3_loss, data)
    ours, _, _, step = train(model, qwen3_loss, data, "default")
    torch.testing.assert_close(ours, losses, rtol=1e-2, atol=1e-2)
    one_cuda_graph(step)


def test_after_a_refused_capture_the_gpu_works():
    """Liger's loss takes the number of labels to the host, which the batch gives; a branch on the loss is refused in
    one line, and no kernel has run on what is not there."""
    transformers = pytest.importorskip("transformers")
    liger = pytest.importorskip("liger_kernel.transformers")

    def loss(model, batch):
        logits = model(input_ids=batch["tokens"]).logits
        return liger.LigerCrossEntropyLoss()(logits.flatten(0, 1), batch["targets"].flatten())

    def refused(model, batch):
        value = loss(model, batch)
        return value * 2 if value > 3 else value

    model = liger_qwen3()
    assert isinstance(model, transformers.PreTrainedModel)
    with pytest.raises(stepgraph.errors.CaptureError, match="needs a tensor's value"):
        stepgraph.capture(model, refused, batches()[0], torch.optim.AdamW(model.parameters(), fused=True))
    torch.cuda.synchronize()
    plain = loss(model, batches()[0])
    step = stepgraph.capture(model, loss, batches()[0], passes="exact")
    assert torch.equal(step(batches()[0]), plain.detach())
