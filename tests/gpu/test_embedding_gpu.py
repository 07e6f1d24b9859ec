"""The gradient of an embedding's table on a GPU: right, repeatable, inside CUDA graphs, and no stop for the host."""

import copy

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph.kernels.embedding.gradient import embedding_backward
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import configured

DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def zipf(places, num_weights):
    """Indices of which row v is looked up about as often as 1 / v, as tokens of a language are: heavy duplicates."""
    return (num_weights ** torch.rand(places, device=DEVICE, dtype=torch.float64)).long().clamp_(1, num_weights) - 1


def truth(grad, indices, num_weights, padding=-1):
    """(gradient, gradient of |grad|) in float64, added by torch's own embedding."""
    table = torch.zeros(num_weights, grad.shape[-1], dtype=torch.float64, device=DEVICE, requires_grad=True)
    results = []
    for values in (grad.double(), grad.double().abs()):
        looked_up = F.embedding(indices, table, padding_idx=padding if padding >= 0 else None)
        results += torch.autograd.grad(looked_up, table, values)
    return results


def check(result, grad, indices, num_weights, padding=-1):
    expected, size = truth(grad, indices, num_weights, padding)
    assert (result.dtype, result.shape) == (grad.dtype, expected.shape) and result.is_contiguous()
    # 32 roundings of fp32 lie on a number's way through its chunk and 4 + chunks / 16 from there, 100 for 32768 equal
    # indices, each up to 2^-24 of the sum of absolute values; then one to the dtype, or half of fp16's smallest number.
    bound = 2**-16 * size + torch.finfo(result.dtype).eps * expected.abs() + 2**-25
    error = (result.double() - expected).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max().item():.1f} times the bound"
    assert not result[size.eq(0).all(1)].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 100, 2048, 4097])
@pytest.mark.parametrize("places", [1, 32, 4095, 16384, 16391])
def test_kernel(places, D, dtype):
    num_weights = 3000
    grad, indices = torch.randn(places, D, device=DEVICE).to(dtype), zipf(places, num_weights)
    result = embedding_backward(grad, indices, num_weights, -1)
    check(result, grad, indices, num_weights)
    for again in (indices, indices.int()):
        assert torch.equal(embedding_backward(grad, again, num_weights, -1), result)


@pytest.mark.parametrize("padding", [-1, 0, 1, 7])
def test_equal_indices_and_padding(padding):
    grad, indices = torch.randn(4, 8192, 256, device=DEVICE).bfloat16(), torch.full((4, 8192), 7, device=DEVICE)
    indices[1, ::7] = 1
    check(embedding_backward(grad, indices, 9, padding), grad, indices, 9, padding)


def test_nothing_and_rows_apart_in_memory():
    empty = embedding_backward(
        torch.randn(0, 64, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE), 5, -1
    )
    assert empty.shape == (5, 64) and not empty.any()
    grad, indices = torch.randn(96, 6000, device=DEVICE).t(), zipf(6000, 50)
    check(embedding_backward(grad, indices, 50, -1), grad, indices, 50)


def test_the_host_does_not_wait():
    grad, indices = torch.randn(16384, 512, device=DEVICE), zipf(16384, 128256)
    embedding_backward(grad, indices, 128256, -1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        embedding_backward(grad, indices, 128256, -1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_a_cuda_graph():
    """Replayed on other indices and gradients, and again on the first: the bits of plain calls."""
    batches = [(torch.randn(16384, 1024, device=DEVICE).bfloat16(), zipf(16384, 32000)) for _ in range(2)]
    plain = [embedding_backward(*batch, 32000, -1) for batch in batches]
    grad, indices = (t.clone() for t in batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = embedding_backward(grad, indices, 32000, -1)
    for i in (0, 1, 0, 1):
        grad.copy_(batches[i][0])
        indices.copy_(batches[i][1])
        graph.replay()
        assert torch.equal(result, plain[i])


def test_more_elements_than_an_int32_counts():
    D = 8192
    num_weights = 2**31 // D + 8
    if torch.cuda.mem_get_info()[0] < 3 * num_weights * D * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    grad = torch.randn(100, D, device=DEVICE).bfloat16()
    indices = torch.full((100,), num_weights - 1, device=DEVICE)
    indices[0] = 0
    result = embedding_backward(grad, indices, num_weights, -1)
    assert torch.equal(result[0], grad[0])
    torch.testing.assert_close(result[-1].double(), grad[1:].double().sum(0), rtol=2**-8, atol=1e-4)
    assert not result[1:-1].any()


def test_opcheck():
    grad, indices = torch.randn(40, 16, device=DEVICE), torch.randint(9, (40,), device=DEVICE)
    torch.library.opcheck(embedding_backward, (grad, indices, 9, 2))


CONFIG = Llama3Config(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=512, vocab_size=4096, max_seq_len=512)


def tokens(n=3, batch=10, length=512):
    """More places than the 3072 from which on torch's own operator sorts."""
    ids = zipf(n * batch * (length + 1), CONFIG.vocab_size).view(n, batch, length + 1)
    return [{"tokens": i[:, :-1].contiguous(), "targets": i[:, 1:].contiguous()} for i in ids]


def captured(model, batch, optimizer=None, **options):
    clip = 1.0 if optimizer else None
    return stepgraph.capture(model, next_token_loss, batch, optimizer, max_grad_norm=clip, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_llama(tied):
    """In fp32, where torch's own differs by the order of its sums alone."""
    config = Llama3Config(**{**vars(CONFIG), "tie_embeddings": tied})
    model, batch = Llama3(config).to(DEVICE), tokens(1)[0]
    passes, grads = configured("default", inductor="off", cuda_graph=False), []
    for disable in (("embedding_gradient",), ()):
        twin = copy.deepcopy(model)
        step = captured(twin, batch, passes=passes, disable=disable)
        step(batch)
        grads.append(twin.embed.weight.grad)
    report = next(r for r in step.report if r.name == "embedding_gradient")
    assert (report.matched, report.changed, report.notes) == (1, 1, [])
    assert (grads[1] - grads[0]).norm() < 1e-4 * grads[0].norm()


@pytest.mark.slow
@pytest.mark.parametrize("inductor", ["full", "off"])
def test_the_step_is_one_cuda_graph(inductor):
    """With the pass and without; with it nothing of the embedding is left to eager."""
    model, batches, reports = Llama3(CONFIG).to(DEVICE, torch.bfloat16), tokens(), []
    for disable in (("embedding_gradient",), ()):
        twin = copy.deepcopy(model)
        optimizer = stepgraph.MasterAdamW(twin.parameters(), lr=1e-3)
        step = captured(twin, batches[0], optimizer, passes=configured("default", inductor=inductor), disable=disable)
        losses = [step(batches[i % len(batches)]).item() for i in range(12)]
        assert losses[-1] < losses[0]
        reports.append({report.name: report for report in step.report})
    for report in reports:
        assert report["cuda_graph"].summary.startswith("1 CUDA graph, 0 nodes on the host"), report["cuda_graph"].notes
    if inductor == "full":
        left = [any("embedding" in note for note in report["inductor"].notes) for report in reports]
        assert left == [True, False]
