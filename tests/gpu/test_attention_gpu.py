"""Backends of attention on a GPU: each against attention in fp64, the bits of a direct call, and what each takes."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import stepgraph
from stepgraph.bench.norm.timing import graph_ms
from stepgraph.compat import FakeTensorMode
from stepgraph.costs.attention import OPERATORS, Case
from stepgraph.kernels.attention import flash4_attention, flash4_attention_backward, unavailable
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import configured
from stepgraph.passes.attention.backends import BACKENDS, refusal
from stepgraph.passes.attention.choose import AttentionOptions, fastest

DEVICE = "cuda"
BF16 = torch.bfloat16
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
HEADS = ((4, 4), (8, 2))  # of queries, of keys
LLAMA = Llama3Config(dim=256, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=512, vocab_size=512, max_seq_len=128)
TORCHS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
EAGER = tuple(backend for backend in BACKENDS if backend != "flex")  # what runs without Inductor
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="what is measured, and must be taken, is of an H100 or H200")


def needs(backend):
    if backend == "fa4" and unavailable() is not None:
        pytest.skip(unavailable())


class Attend(torch.nn.Module):
    """Attention whose queries, keys and values, laid out as (B, T, H, D), are its parameters."""

    def __init__(self, B, T, heads, widths, causal, dtype=BF16, dropout=0.0):
        super().__init__()
        (H, H_kv), (D, D_v) = heads, widths
        self.causal, self.dropout = causal, dropout
        for name, *shape in (("q", H, D), ("k", H_kv, D), ("v", H_kv, D_v)):
            setattr(self, name, torch.nn.Parameter(torch.randn(B, T, *shape, device=DEVICE).to(dtype)))

    def forward(self):
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.dropout, enable_gqa=q.shape[1] != k.shape[1]
        )


def loss_of(model, batch):
    return (model().transpose(1, 2) * batch["dy"]).float().sum()


def dy_for(model):
    return {"dy": torch.randn(*model.q.shape[:3], model.v.shape[3], device=DEVICE).to(model.q.dtype)}


def captured(model, batch, backend, inductor="off", **options):
    """The step, and the report of the pass."""
    passes = configured(attention=backend, inductor=inductor, **options)
    step = stepgraph.capture(model, loss_of, batch, passes=passes)
    return step, next(r for r in step.report if r.name == "attention")


def gradients(model, batch, context=None):
    """(loss, gradients) of eager on a copy of ``model``."""
    model = copy.deepcopy(model)
    if context is None:
        loss = loss_of(model, batch)
        loss.backward()
    else:
        with sdpa_kernel(context):
            loss = loss_of(model, batch)
            loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


# Every backend


@hopper
@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_as_near_to_fp64_as_eager(backend, widths, heads, causal):
    needs(backend)
    model = Attend(2, 320, heads, widths, causal)
    batch = dy_for(model)
    if backend == "flash2" and widths == (192, 128):
        with pytest.raises(ValueError, match="not of 192 and 128"):
            captured(model, batch, backend)
        return
    near_to_fp64(model, batch, backend)


def near_to_fp64(model, batch, backend, **options):
    """The loss and the gradients by ``backend`` are as near to fp64 as those of eager."""
    exact = gradients(copy.deepcopy(model).double(), {"dy": batch["dy"].double()}, SDPBackend.MATH)
    usual = gradients(model, batch)
    step, report = captured(model, batch, backend, **options)
    assert f"1 by {backend}" in report.summary, (report.summary, report.notes)
    nodes = [OPERATORS[n.target] for n in step.graph.graph.nodes if n.target in OPERATORS]
    assert nodes == [(backend, "forward"), (backend, "backward")]
    loss = step(batch)
    # A sum of products with the result: as far from fp64 as their roundings to bf16 are, which cancel.
    noise = batch["dy"].numel() ** 0.5 * 2**-8
    assert abs(loss.double() - exact[0]) <= 2 * abs(usual[0].double() - exact[0]) + noise
    for name, p, right, other in zip("qkv", model.parameters(), exact[1], usual[1], strict=True):
        error, bound = ((x.double() - right).norm() for x in (p.grad, other))
        # In fp32 both are as near as their roundings happen to lie.
        assert error <= 2 * bound + 1e-5 * right.norm() and error <= 0.02 * right.norm(), name


@pytest.mark.parametrize("backend", ["flash2", "fa4"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_deterministic_bits_of_a_direct_call(backend, widths, heads, deterministic):
    """Also from run to run, and in a CUDA graph."""
    needs(backend)
    if refusal(backend, Case(2, *heads, 320, 320, *widths, True, BF16), CAPABILITY):
        pytest.skip("not for this GPU or width")
    if widths == (192, 128) and heads[0] != heads[1]:
        pytest.skip("under deterministic algorithms torch takes this apart, and the graph has no attention")
    model = Attend(2, 320, heads, widths, True)
    batch = dy_for(model)
    if backend == "flash2":
        right = gradients(model, batch, TORCHS[backend])[1]
    else:
        from flash_attn.cute import flash_attn_func

        leaves = [p.detach().clone().requires_grad_() for p in model.parameters()]
        found = flash_attn_func(*leaves, causal=True, deterministic=True)
        out = found[0] if isinstance(found, tuple) else found
        right = torch.autograd.grad(out, leaves, batch["dy"])
    step, report = captured(model, batch, backend)
    assert f"1 by {backend}" in report.summary
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        step(batch)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), right, strict=True))


@hopper
@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_forward_has_the_bits_of_a_direct_call(backend, widths):
    needs(backend)
    if refusal(backend, Case(2, 8, 2, 320, 320, *widths, True, BF16), CAPABILITY):
        pytest.skip("not for this width")
    model = Attend(2, 320, (8, 2), widths, True)
    batch = dy_for(model)
    if backend in TORCHS:
        right = gradients(model, batch, TORCHS[backend])[0]
    else:
        from flash_attn.cute import flash_attn_func

        found = flash_attn_func(model.q, model.k, model.v, causal=True)
        out = found[0] if isinstance(found, tuple) else found
        right = (out * batch["dy"]).float().sum().detach()
    assert torch.equal(captured(model, batch, backend)[0](batch), right)


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("layout", list(itertools.product("th", repeat=2)), ids="".join)
def test_fake_results_lie_in_memory_as_real_ones(backend, layout):
    """Of q, and of k, v and dy: by tokens (t) or by heads (h)."""
    needs(backend)
    if refusal(backend, Case(2, 4, 4, 64, 64, 64, 64, True, BF16), CAPABILITY):
        pytest.skip("not for this GPU")

    def made(kind):
        x = torch.randn(2, *((64, 4) if kind == "t" else (4, 64)), 64, device=DEVICE).to(BF16)
        return x.transpose(1, 2) if kind == "t" else x

    q, k, v, dy = (made(kind) for kind in (layout[0], layout[1], layout[1], layout[1]))
    forward, backward = calls(backend, q, k, v, dy, True)
    real = [forward()[0], *backward()]
    with FakeTensorMode() as mode:
        forward, backward = calls(backend, *map(mode.from_tensor, (q, k, v, dy)), True)
        fake = [forward()[0], *backward()]
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def calls(backend, q, k, v, dy, causal):
    """Two functions: forward, which gives the result and the logarithms; backward, which gives three gradients."""
    aten = torch.ops.aten
    lengths = (q.shape[2], k.shape[2])
    if backend == "cudnn":
        op = aten._scaled_dot_product_cudnn_attention
        out, lse, *_, seed, offset, _ = op(q, k, v, None, True, 0.0, causal)
        given = (dy, q, k, v, out, lse, seed, offset, None, None, None, *lengths, 0.0, causal)
        return (
            lambda: op(q, k, v, None, True, 0.0, causal)[:2],
            lambda: aten._scaled_dot_product_cudnn_attention_backward(*given),
        )
    if backend == "flash2":
        op = aten._scaled_dot_product_flash_attention
        out, lse, *_, seed, offset, _ = op(q, k, v, 0.0, causal)
        given = (dy, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, offset)
        return (
            lambda: op(q, k, v, 0.0, causal)[:2],
            lambda: aten._scaled_dot_product_flash_attention_backward(*given),
        )
    out, lse = flash4_attention(q, k, v, None, causal)
    given = (dy, q, k, v, out, lse, None, causal, False)
    return (lambda: flash4_attention(q, k, v, None, causal), lambda: flash4_attention_backward(*given))


# What stays, and what is refused


class Copied(Attend):
    """Its keys go behind an empty cache's, its values are made contiguous."""

    def forward(self):
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        k, v = torch.cat([k.new_empty(0), k], dim=-2), v.contiguous()
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", ["cudnn", "flash2"])
def test_copies_of_its_inputs_are_not_made(backend, heads):
    torch.manual_seed(0)
    copied, plain = Copied(2, 256, heads, (64, 64), True), Attend(2, 256, heads, (64, 64), True)
    plain.load_state_dict(copied.state_dict())
    batch, found = dy_for(plain), []
    for model in (copied, plain):
        step, report = captured(model, batch, backend)
        found.append([step(batch), *(step(batch) for _ in range(3)), *(p.grad for p in model.parameters())])
        assert ("2 of their inputs are read in place, without a copy" in report.notes) == (model is copied)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_dropout_stays_and_draws_anew_in_every_replay():
    model = Attend(2, 128, (4, 4), (64, 64), True, dropout=0.25)
    batch = dy_for(model)
    step, report = captured(model, batch, "auto")
    assert report.changed == 0 and "it has dropout" in report.notes[0]
    losses = [step(batch).item() for _ in range(6)]
    assert len(set(losses)) == 6
    assert next(r for r in step.report if r.name == "cuda_graph").summary.startswith("1 CUDA graph, 0 nodes")


def test_torch_is_asked_what_the_user_switched_off():
    model = Attend(2, 128, (4, 4), (64, 64), True)
    batch = dy_for(model)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with pytest.raises(ValueError, match=r"attention=flash2 does not support .* off in"):
            captured(model, batch, "flash2")
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert "1 by flash2" in captured(model, batch, "flash2")[1].summary


def test_deterministic_algorithms_leave_cudnn_out(deterministic):
    model = Attend(2, 128, (4, 4), (64, 64), True)
    with pytest.raises(ValueError, match=r"attention=cudnn.*use_deterministic_algorithms"):
        captured(model, dy_for(model), "cudnn")


def test_without_the_package():
    if unavailable() is None:
        pytest.skip("it is installed")
    model = Attend(2, 128, (4, 4), (64, 64), True)
    with pytest.raises(ValueError, match="pip install flash-attn-4"):
        captured(model, dy_for(model), "fa4")


# Steps


def batch_of(seed=0):
    ids = torch.randint(512, (4, 129), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


@hopper
@pytest.mark.parametrize(
    ("backend", "inductor", "memory"),
    [
        *itertools.product(("auto", *EAGER, "eager"), ["off"], ("none", "full")),
        *itertools.product(BACKENDS, ["full"], ["none"]),
        *itertools.product(["flex"], ["regional"], ("none", "full")),
    ],
)
def test_a_llama_step(backend, inductor, memory):
    needs(backend)
    model = Llama3(LLAMA).to(DEVICE, BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = stepgraph.capture(
        model,
        next_token_loss,
        batch_of(),
        optimizer,
        max_grad_norm=1.0,
        passes=configured(attention=backend, inductor=inductor, memory=memory),
    )
    reports = {r.name: r for r in step.report}
    if backend == "eager":
        assert "attention" not in reports
    elif backend != "auto":
        assert f"3 by {backend}" in reports["attention"].summary
    verified = step.verify(batch_of())
    assert verified.close, str(verified)
    losses = [step(batch_of(i % 3)).item() for i in range(12)]
    assert losses[11] < losses[2]  # the same batch, nine updates later
    assert reports["cuda_graph"].summary.startswith("1 CUDA graph, 0 nodes on the host")


# Times

CASES = [
    Case(4, 32, 8, 4096, 4096, 64, 64, True, BF16),
    Case(32, 8, 8, 2048, 2048, 64, 64, True, BF16),
    Case(64, 12, 12, 1024, 1024, 64, 64, True, BF16),
    Case(16, 32, 8, 512, 512, 64, 64, True, BF16),
    Case(4, 16, 16, 4096, 4096, 96, 96, True, BF16),
    Case(1, 32, 8, 8192, 8192, 128, 128, True, BF16),
    Case(4, 32, 8, 2048, 2048, 128, 128, True, BF16),
    Case(16, 32, 8, 512, 512, 128, 128, True, BF16),
    Case(1, 8, 2, 8192, 8192, 128, 128, True, BF16),
    Case(4, 16, 16, 4096, 4096, 192, 128, True, BF16),
    Case(4, 16, 16, 4096, 4096, 256, 256, True, BF16),
    Case(2, 8, 4, 2048, 2048, 256, 256, True, BF16),
    Case(4, 32, 8, 4096, 4096, 64, 64, False, BF16),
    Case(32, 12, 12, 512, 512, 64, 64, False, BF16),
    Case(1, 32, 8, 8192, 8192, 128, 128, False, BF16),
    Case(4, 32, 8, 4096, 4096, 64, 64, True, torch.float16),
]


@pytest.mark.timed
@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_times(case, capsys):
    """Milliseconds by graph replay, in the form of `costs.attention`'s table; backends that take longer than what
    ``auto`` chooses. The printed line ends with whether backward gave the same bits ten times."""
    heads, options = (case.heads, case.kv_heads), AttentionOptions(capability=CAPABILITY)
    widths = {"q": case.width, "k": case.width, "v": case.value_width, "dy": case.value_width}
    q, k, v, dy = (
        torch.randn(case.batch, case.queries, heads[name in "kv"], width, device=DEVICE).to(case.dtype).transpose(1, 2)
        for name, width in widths.items()
    )
    flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    able = [b for b in EAGER if refusal(b, case, CAPABILITY) is None and (b != "fa4" or unavailable() is None)]
    times = {}
    for backend in able:
        forward, backward = calls(backend, q, k, v, dy, case.causal)
        with torch.cuda.stream(torch.cuda.Stream()):
            times[backend] = graph_ms([forward], flush), graph_ms([backward], flush)
        first = backward()
        same = all(all(map(torch.equal, backward(), first)) for _ in range(10))
        sizes = (case.batch * case.heads, case.queries, case.width, case.value_width)
        figures = ", ".join([f'"{backend}"', *map(str, sizes), *(f"{ms:.2f}" for ms in times[backend])])
        repeats = "repeats itself" if same else "differs from run to run"
        with capsys.disabled():
            print(f"\n_Measured({figures}),  # {case}; backward {repeats}", end="")
    chosen, why = fastest(case, "cudnn" if "cudnn" in able else able[0], able, True, options)
    if "ms by figures" in why:
        assert sum(times[chosen]) <= 1.05 * min(map(sum, times.values())), (times, why)
