"""Products by cuBLASLt's algorithms have torch's bits, in any layout, and a step uses them in its CUDA graph."""

import pytest
import torch

import stepgraph
from stepgraph.kernels import cublas_lt
from stepgraph.kernels.cublas_lt import Problem, by_torch
from stepgraph.kernels.products import product
from stepgraph.models import Llama3, Llama3Config, next_token_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def matrices(m, n, k, turned, biased, dtype):
    def matrix(rows, columns, turn):
        made = torch.randn(columns, rows + 8, device="cuda", dtype=dtype)[:, :rows].t() if turn else None
        return torch.randn(rows, columns + 8, device="cuda", dtype=dtype)[:, :columns] if made is None else made

    bias = torch.randn(n, device="cuda", dtype=dtype) if biased else None
    return matrix(m, k, turned[0]), matrix(k, n, turned[1]), bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_torchs_bits_in_any_layout(turned, biased, dtype):
    a, b, bias = matrices(4096, 2048, 1024, turned, biased, dtype)
    before = torch.cuda.get_rng_state()
    found = product(a, b, bias)
    assert torch.equal(torch.cuda.get_rng_state(), before)  # random operands are timed
    assert torch.equal(found, by_torch(a, b, bias))
    choice = cublas_lt._CHOICES[Problem.of(a, b, bias), cublas_lt._settings()]
    assert choice.timed and choice.best_us <= choice.torch_us


@pytest.mark.timed
def test_an_algorithm_is_chosen_where_torchs_is_slow():
    """The first product of GPT-2's MLP: 1.11 times as fast on an H200. The choice is that of torch's settings."""
    a, b, _ = matrices(16384, 4096, 1024, (False, True), False, torch.bfloat16)
    choice = cublas_lt.choose(Problem.of(a, b, None))
    assert choice.run is not None and choice.torch_us > 1.02 * choice.best_us
    assert torch.equal(product(a, b), by_torch(a, b))
    before = len(cublas_lt._CHOICES)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        assert torch.equal(product(a, b), by_torch(a, b)) and len(cublas_lt._CHOICES) == before + 1
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def test_that_a_product_is_timed_at_its_first_call_is_no_wait_of_its_own():
    """Else a saved step, whose products are timed at its first call, runs their pieces outside its CUDA graphs."""
    a, b, _ = matrices(4096, 2048, 1024, (False, False), False, torch.float16)
    cublas_lt._CHOICES.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        product(a, b)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(cublas_lt._CHOICES) == 1


def test_every_algorithm_multiplies():
    """Algorithms that are not chosen are right as well: close to the product in fp32, in whatever order they sum."""
    a, b, bias = matrices(2048, 4096, 1024, (False, True), True, torch.bfloat16)
    expected = a.float() @ b.float() + bias.float()
    runs = cublas_lt._algorithms(Problem.of(a, b, bias))
    assert len(runs) > 1
    for run in runs:
        out = torch.full((2048, 4096), torch.nan, device="cuda", dtype=torch.bfloat16)
        run(out, a, b, bias)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=0.3)


def test_an_operand_that_is_not_aligned_goes_to_torch():
    a, b, _ = matrices(4096, 2048, 1024, (False, False), False, torch.bfloat16)
    product(a, b)
    shifted = torch.empty(a.numel() + 1, device="cuda", dtype=a.dtype)[1:].view(4096, 1024).copy_(a)
    assert torch.equal(product(shifted, b), by_torch(shifted, b))


@pytest.mark.parametrize("inductor", ["off", "full"])
def test_a_step_has_the_bits_of_torchs_products(inductor):
    """In one CUDA graph, with and without the pass."""
    config = Llama3Config(
        dim=1024, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=4096, vocab_size=2048, max_seq_len=2048
    )

    def losses(**options):
        torch.manual_seed(0)
        model = Llama3(config).to("cuda", torch.bfloat16)
        ids = torch.randint(2048, (4, 2049), device="cuda")
        batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        given = stepgraph.StepOptions("default", inductor=inductor, attention="eager", **options)
        step = stepgraph.capture(model, next_token_loss, batch, optimizer, passes=given)
        found = torch.stack([step(batch).clone() for _ in range(3)])
        return found, {report.name: report for report in step.report}

    found, reports = losses()
    expected, _ = losses(disable_pass=("tune_products",))
    assert reports["tune_products"].changed > 20 and "ms per step faster" in reports["tune_products"].summary
    assert reports["cuda_graph"].summary.startswith("1 CUDA graph, 0 nodes on the host")
    assert torch.equal(found[0], expected[0])  # attention's backward may add in any order
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
