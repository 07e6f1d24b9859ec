"""LoRA of the Llama 3.1 8B shape: steps of peft's model by eager with Liger, `torch.compile` and stepgraph, compared.

Every provider trains the same model (random weights, drawn on the device) with the same adapters (all linear layers,
bf16) and the same batches, by fused AdamW and with clipping, in a process of its own with empty compile caches. Seconds
include compiling; ``seconds_after`` forecasts runs from the first step and the median of the later ones. ``nf4``: the
frozen linear layers but the head in 4 bits, by bitsandbytes where stepgraph is not meant; ``fp8``: in fp8. Peaks are
those of the steps, after the model was made.

    python benchmarks/lora.py --device cuda --json FILE [--layers 32] [--providers NAME ...] [--products]

``--products`` measures, before the providers, what the pass `lora` replaces: each product with its adapter as one sum,
and as others have it. ``--tiny`` is for a CPU.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
from children import add_options, measure_each, timed_steps
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import stepgraph
from stepgraph.kernels.quant import quantize_linear
from stepgraph.passes import StepOptions

PROVIDERS = (
    "stepgraph", "torch.compile", "liger", "eager", "stepgraph, nf4", "torch.compile, nf4", "eager, nf4",
    "stepgraph, fp8", "stepgraph, without the pass lora",
)  # fmt: skip
LLAMA = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, max_position_embeddings=8192,
)  # fmt: skip
MOE = dict(
    hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=8, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=16, num_experts_per_tok=4, vocab_size=151936,
)  # fmt: skip
TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=320,
)  # fmt: skip
TINY_MOE = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16)
CLIP = 1.0


def build(name: str, options: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """peft's model and the optimizer of its adapters."""
    ours, bits = name.startswith("stepgraph"), name.rpartition(", ")[2]
    torch.manual_seed(0)
    moe = options.model == "qwen3-moe"
    sizes = MOE if moe else LLAMA
    if options.tiny:
        sizes = TINY | (TINY_MOE if moe else {})
    if options.layers:
        sizes = sizes | {"num_hidden_layers": options.layers}
    config = (Qwen3MoeConfig if moe else LlamaConfig)(**sizes)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = (Qwen3MoeForCausalLM if moe else LlamaForCausalLM)(config)
    torch.set_default_dtype(torch.float32)
    options.params = sum(p.numel() for p in model.parameters())
    if bits in ("nf4", "fp8") and ours:
        quantize_linear(model, bits, skip=["lm_head"])
    elif bits == "nf4":
        with_bitsandbytes(model)
    if options.checkpointing and not ours:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    targets = {"target_modules": "all-linear"}
    if moe:  # the experts' fused parameters, and attention
        experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        targets = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": experts}
    lora = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, task_type="CAUSAL_LM", **targets)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    for param in trained:  # peft's own choice next to a quantized weight is fp32
        param.data = param.data.bfloat16()
    assert all(p.device.type == options.device for p in model.parameters())
    if options.device == "cuda":  # a model is made in bf16, and its layers are quantized one by one
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model, torch.optim.AdamW(trained, lr=1e-4, fused=True)


def with_bitsandbytes(model: torch.nn.Module) -> None:
    """Its frozen linear layers but the head as transformers makes them for a `BitsAndBytesConfig`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, old in [*model.named_modules()]:
        if type(old) is torch.nn.Linear and path != "lm_head":
            new = Linear4bit(
                old.in_features, old.out_features, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16,
                device="meta",
            )  # fmt: skip
            made = Params4bit(old.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
            new.weight = made.to(old.weight.device)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
    model.is_loaded_in_4bit = True  # what peft looks at


def batches(options: argparse.Namespace, vocab: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        ids = torch.randint(vocab, (options.batch, options.seq), generator=generator).to(options.device)
        made.append({"input_ids": ids, "labels": ids})
    return made


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


def eager_step(name: str, options: argparse.Namespace) -> tuple[Callable, Any]:
    if name.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3_moe

        (apply_liger_kernel_to_qwen3_moe if options.model == "qwen3-moe" else apply_liger_kernel_to_llama)()
    model, optimizer = build(name, options)
    trained = [p for p in model.parameters() if p.requires_grad]
    call = torch.compile(model, dynamic=False) if name.startswith("torch.compile") else model

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_fn(call, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model


def captured_step(name: str, options: argparse.Namespace) -> tuple[Callable, Any]:
    model, optimizer = build(name, options)
    without = ("lora",) if name.endswith("without the pass lora") else ()
    chosen = StepOptions(inductor=options.inductor, disable_pass=without, memory=options.memory)
    batch = batches(options, model.config.vocab_size)[0]
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=CLIP, passes=chosen)
    return step, model


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One provider: its first step, ``--steps`` later ones, its losses and its memory."""
    step, model = (captured_step if name.startswith("stepgraph") else eager_step)(name, options)
    data = batches(options, model.config.vocab_size)
    losses, ends = timed_steps(lambda number: step(data[number % len(data)]).item(), options.steps + 4)
    first_step_s, times = ends[0], [b - a for a, b in itertools.pairwise([0.0, *ends])]
    median = statistics.median(times[4:])  # CUDA graphs are recorded by then
    tokens = options.batch * options.seq
    table = model.get_input_embeddings().weight.numel()
    found = {
        "tokens_per_s": tokens / median,
        "step_ms": 1e3 * median,
        "fastest_step_ms": 1e3 * min(times[4:]),
        # Attention and adapters are left out.
        "tflops": 4e-12 * (options.params - table) * tokens / median if options.model == "llama-8b" else None,
        "first_step_s": first_step_s,
        "seconds_after": {str(n): first_step_s + (n - 1) * median for n in (10, 100, 1000)},
        "losses": losses[:6] + losses[-1:],
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "params": options.params,
    }
    if options.device == "cuda":
        found["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if name.startswith("stepgraph"):
        told = "lora lora_experts tile_sequence fuse_norm attention fuse_loss fit_memory inductor".split()
        found["passes"] = [r.line() for r in step.report if r.name in told]
        found["notes"] = [f"{r.name}: {n}" for r in step.report if r.name in ("lora", "fit_memory") for n in r.notes]
    return found


def products(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of y = x W^T + s t B^T, and of the sum of three products with their adapters in backward."""
    from stepgraph.kernels.lora import sum_products

    M, r, dtype = options.batch * options.seq, options.rank, torch.bfloat16
    shapes = [(64, 64), (64, 128)] if options.tiny else [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)]
    made = lambda *shape: torch.randn(*shape, device=options.device, dtype=dtype)
    found = []
    for K, N in shapes:
        x, w, t, b, dy = made(M, K), made(N, K), made(M, r), made(N, r), made(M, N)
        a = made(r, K)
        add = torch.compile(lambda y, z: y + 2.0 * z, dynamic=False)
        w2 = w.t()
        ways = {
            "base product alone": lambda: x @ w2,
            "two products and a fused addition": lambda: add(x @ w2, t @ b.t()),
            "addmm": lambda: torch.addmm(x @ w2, t, b.t(), alpha=2.0),
            "sum_products": lambda: sum_products([t, x], [b.t(), w2], None, 2.0),
            "sum_products, adapter last": lambda: (x @ w2).addmm_(t, b.t(), alpha=2.0),
            "input gradient alone": lambda: dy @ w,
            "input gradient: two products and a fused addition": lambda: add(dy @ w, t @ a),
            "input gradient: sum_products": lambda: sum_products([t, dy], [a, w]),
            "x A^T": lambda: x @ a.t(),
            "dy^T t": lambda: dy.t() @ t,
        }
        found.append({"M": M, "K": K, "N": N, "r": r} | {name: milliseconds(way, options) for name, way in ways.items()})
    return found


def milliseconds(way: Callable[[], torch.Tensor], options: argparse.Namespace, repeats: int = 20) -> float:
    """Median milliseconds of a call, without the host's part on a GPU."""
    for _ in range(3):
        way()
    if options.device != "cuda":
        begun = time.perf_counter()
        way()
        return 1e3 * (time.perf_counter() - begun)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            way()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return statistics.median(times)


def measure_or_products(name: str, options: argparse.Namespace) -> dict[str, Any]:
    return {"ms": products(options)} if name == "products" else measure(name, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, for a CPU")
    parser.add_argument("--model", default="llama-8b", choices=("llama-8b", "qwen3-moe"))
    parser.add_argument("--layers", type=int, help="as many blocks instead of all")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--inductor", default="full", choices=("full", "regional", "off"), help="of stepgraph")
    parser.add_argument("--memory", default="none", help="the memory policy of stepgraph")
    parser.add_argument("--checkpointing", action="store_true", help="the other providers checkpoint each layer")
    parser.add_argument("--products", action="store_true", help="also measure what the pass lora replaces")
    add_options(parser, PROVIDERS, 3, 150)
    options = parser.parse_args()
    if options.tiny and "--seq" not in sys.argv:
        options.seq = 64
    names = (["products"] if options.products else []) + options.providers
    measure_each(options, measure_or_products, names)


if __name__ == "__main__":
    main()
