"""LoRA on a GPU: the sum of products, peft's model by the default pipeline compared with eager, and what it leaves."""

import copy

import pytest
import torch

import stepgraph
from stepgraph.kernels.lora import gated_adapters, gated_adapters_backward, sum_products
from stepgraph.kernels.lora.sums import reference
from stepgraph.passes import StepOptions
from tests.kernels.lora.test_gated import operands

SMALL = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_sum_products(dtype, biased, scale):
    torch.manual_seed(0)
    made = lambda *shape: torch.randn(*shape, device="cuda").to(dtype)  # noqa: E731
    wide = made(512, 48)
    a, b = [wide[:, 16:32], made(512, 256)], [made(384, 16).t(), made(384, 256).t()]  # strides as the pass gives them
    bias = made(384) if biased else None
    y = sum_products(a, b, bias, scale)
    right = reference([x.double() for x in a], [x.double() for x in b], bias.double() if biased else None, scale)
    error = float((y.double() - right).norm() / right.norm())
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(y, sum_products(a, b, bias, scale))


@pytest.mark.parametrize("shape", [(4096, 14336, 16), (1000, 1416, 8), (512, 3072, 32)], ids=str)
def test_gated_adapters(shape):
    forward, dh, dt = operands(*shape, torch.float32)
    forward, (dh, dt) = ([x.bfloat16().cuda() for x in some] for some in (forward, (dh, dt)))
    *others, a = forward
    arguments = dh, *others, dt, a, 2.0, 0.5
    for operator, given in ((gated_adapters, (*forward, 2.0, 0.5)), (gated_adapters_backward, arguments)):
        found = operator(*given)
        right = operator(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in given))
        for mine, again, theirs in zip(found, operator(*given), right, strict=True):
            assert mine.shape == theirs.shape and mine.is_contiguous() and torch.equal(mine, again)
            error = (mine.cpu().float() - theirs.float()).norm() / theirs.float().norm()
            assert error < 1e-2


@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_peft_by_the_default_pipeline(kind):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).cuda()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02)
    model = model.bfloat16() if kind == "bf16" else model
    ids = torch.randint(512, (2, 256), device="cuda")

    def loss_fn(model, ids):
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    def gradients(model, dtype=None):
        model = copy.deepcopy(model).to(dtype or next(model.parameters()).dtype)
        loss_fn(model, ids).backward() if dtype is None else model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    right, eager, mine = gradients(model, torch.float64), gradients(model), copy.deepcopy(model)
    step = stepgraph.capture(mine, loss_fn, ids, passes=StepOptions(cuda_graph=False))
    step(ids)
    found = {name: p.grad.double() for name, p in mine.named_parameters() if p.grad is not None}
    report = next(r for r in step.report if r.name == "lora")
    assert report.summary.startswith("10 of 14 adapters added by products; 10 first products joined to 4"), (
        report.summary
    )
    assert report.summary.endswith("; 2 SwiGLUs between adapters"), report.summary

    def error(gradients_):
        return sum(float((g - right[name]).norm() / right[name].norm()) for name, g in gradients_.items())

    assert found.keys() == eager.keys() and error(found) <= 1.3 * error(eager)


def test_experts_by_the_default_pipeline():
    """As near to fp32 as eager peft, and nothing as large as the experts' weights is computed."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    experts = dict(moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2, head_dim=64)
    base = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **experts))
    base.set_experts_implementation("grouped_mm")
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=16, target_modules=["q_proj"], target_parameters=fused, init_lora_weights=False)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).cuda().bfloat16()
    ids = torch.randint(512, (2, 256), device="cuda")
    loss_fn = lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: E731
    eager, mine, exact = (copy.deepcopy(model) for _ in range(3))
    expected = loss_fn(eager, ids)
    expected.backward()
    exact.get_base_model().set_experts_implementation("eager")  # grouped products are in bf16 alone
    loss_fn(exact.float(), ids).backward()
    step = stepgraph.capture(mine, loss_fn, ids, passes=StepOptions(cuda_graph=False))
    loss = step(ids)
    report = next(r for r in step.report if r.name == "lora_experts")
    assert (report.changed, report.notes) == (4, [])
    assert float(loss) == pytest.approx(float(expected), rel=1e-2)
    # Routing in bf16 sends a token elsewhere now and then, in either.
    for (name, p), q, r in zip(mine.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
        if p.grad is not None:
            ours, theirs, size = ((g.float() - r.grad).norm() for g in (p.grad, q.grad, torch.zeros_like(r.grad)))
            assert ours < 1.3 * theirs + 0.03 * size, name


@pytest.mark.parametrize("kind", [None, "nf4", "fp8"])
def test_a_run_over_two_gpus(tmp_path, kind):
    """Frozen shards in bf16 or fewer bits: bitwise eager on the same ranks, and the losses of one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pytest.importorskip("peft")
    from tests.distributed.test_train import records, train_on
    from tests.train.fine_tuning import make

    make(tmp_path)
    words = ["--init-from-hf", tmp_path / "base", "--data", tmp_path / "chat.jsonl", "--lora", "r=8", "--lr", "1e-2"]
    words += ["--seq-len", "64", "--steps", "4", "--precision", "bf16", "--saved-steps", "off", "--passes", "exact"]
    words += ["--quantize", kind] if kind else []
    train_on(1, *words, "--batch-size", "4", "--out", tmp_path / "one")
    two = ["--batch-size", "2", "--mesh", "fsdp=2"]
    train_on(2, *words, *two, "--verify", "--out", tmp_path / "exact", "--export-hf", tmp_path / "hf")
    train_on(2, *words, *two, "--passes", "default", "--reshard", "always", "--out", tmp_path / "default")
    expected = [loss for _, loss in records(tmp_path / "one", "loss")]
    for name in ("exact", "default"):
        assert [loss for _, loss in records(tmp_path / name, "loss")] == pytest.approx(expected, rel=2e-2)
    assert (tmp_path / "hf" / "adapter" / "adapter_model.safetensors").exists()


def test_two_captures_give_the_same_bits():
    torch.manual_seed(0)
    from tests.passes.matmul.test_lora import BATCH, Model, loss_fn

    made, results = Model().cuda(), []
    for _ in range(2):
        model = copy.deepcopy(made)
        step = stepgraph.capture(model, loss_fn(), BATCH.cuda(), torch.optim.AdamW(model.parameters(), lr=1e-2))
        results.append([step(BATCH.cuda()).clone() for _ in range(5)])
    assert all(map(torch.equal, *results))
