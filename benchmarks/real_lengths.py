"""Fine-tuning on examples of real lengths: packed rows in one captured step, compared with padding.

Every provider trains the same model (random weights) on the same examples, step by step: a step has the examples of one
packed row of ``--tokens`` tokens, and its loss is the mean over their targets. Providers that pad sort a step's examples
by length and run them in microbatches of at most ``--tokens`` padded tokens, the usual way to bound their memory.
``padding-free``: the packed rows in one shape, by stepgraph's attention within documents, as TRL's padding-free training
has them by another kernel. Each provider runs in a process of its own with empty compile caches. Seconds include
compiling.

Lengths are lognormal (median 400 tokens, sigma 0.9), cut at 4,096: the shape of public conversation sets.

    python benchmarks/real_lengths.py [--device cuda] [--steps 100] [--json FILE] [--providers NAME ...]
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from children import add_options, measure_each, report, timed_steps
from transformers import AutoModelForCausalLM, Qwen3Config

import stepgraph
from stepgraph.integrations import PackToBudget, attend_within_documents

PROVIDERS = (
    "stepgraph, packed", "Liger, padded", "torch.compile(dynamic=True), padded", "Liger, padding-free", "eager, padded",
    "torch.compile, padding-free",
)  # fmt: skip
QWEN3_1_7B = dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16)
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
CLIP, IGNORED = 1.0, -100
Batch = dict[str, Any]


def build(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    sizes = TINY if options.tiny else QWEN3_1_7B
    heads = dict(num_key_value_heads=sizes["num_attention_heads"] // 2, head_dim=32 if options.tiny else 128)
    config = Qwen3Config(vocab_size=options.vocab, tie_word_embeddings=True, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config).to(options.device, getattr(torch, options.dtype))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def steps_of(options: argparse.Namespace) -> tuple[PackToBudget, list[dict[str, torch.Tensor]]]:
    """The packed rows, one per step."""
    generator = torch.Generator().manual_seed(0)
    pack = PackToBudget(options.tokens, max_documents=options.tokens // 64, max_length=options.longest, longer="cut")

    def examples():
        while True:
            n = int((torch.randn((), generator=generator) * 0.9 + 6).exp().clamp(8, 4 * options.longest))
            yield {"input_ids": torch.randint(options.vocab, (n,), generator=generator)}

    rows = pack.rows(examples())
    return pack, [next(rows) for _ in range(options.steps)]


def documents(row: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The examples of a packed row, without its padding."""
    starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["input_ids"])]
    parts = [row["input_ids"][a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    targets = [(row["labels"][a:b] != IGNORED).any() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    return [part for part, has in zip(parts, targets, strict=True) if has]


def padded(row: dict[str, torch.Tensor], options: argparse.Namespace) -> list[Batch]:
    """Microbatches of the row's examples, each padded to its longest."""
    groups: list[list[torch.Tensor]] = []
    for example in sorted(documents(row), key=len, reverse=True):
        if groups and (len(groups[-1]) + 1) * len(groups[-1][0]) <= options.tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    made = []
    for group in groups:
        ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in group], batch_first=True)
        made.append({"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORED), "attention_mask": mask})
    return made


def step_of(kind: str, options: argparse.Namespace, pack: PackToBudget, rows: list) -> Callable[[int], float]:
    if kind.startswith("Liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    model, optimizer = build(options)
    whole = not kind.endswith("padded")
    if whole:
        attend_within_documents(model)

    def batch_of(row: dict[str, torch.Tensor]) -> Batch:
        return {k: v.to(options.device) if isinstance(v, torch.Tensor) else v for k, v in pack([row]).items()}

    if kind.startswith("stepgraph"):
        step = stepgraph.capture(
            model, lambda model, batch: model(**batch, use_cache=False).loss, batch_of(rows[0]), optimizer,
            max_grad_norm=CLIP,
        )  # fmt: skip
        return lambda number: step(batch_of(rows[number])).item()
    call = torch.compile(model, dynamic=not whole) if kind.startswith("torch") else model

    def run(number: int) -> float:
        batches = [batch_of(rows[number])] if whole else padded(rows[number], options)
        targets = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            batch = {k: v.to(options.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            loss = call(**({"num_items_in_batch": targets} | batch), use_cache=False).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return run


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One provider over all steps, or those within ``--limit-s`` seconds."""
    pack, rows = steps_of(options)
    real = [sum(map(len, documents(row))) for row in rows]
    run = step_of(name, options, pack, rows)

    def found(losses: list[float], ends: list[float]) -> dict[str, Any]:
        late = [b - a for a, b in itertools.pairwise(ends[len(ends) // 2 :])]
        return {
            "steps": len(ends),
            "seconds": ends[-1],
            "first_step_s": ends[0],
            "later_step_s": sum(late) / max(1, len(late)),
            "real_tokens": sum(real[: len(ends)]),
            "seconds_after": {str(n): ends[n - 1] for n in (1, 10, 50, 100, 200, 500) if n <= len(ends)},
            "losses": losses[:3] + losses[-1:],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None,
        }

    return found(*timed_steps(run, len(rows), lambda losses, ends: report(found(losses, ends))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, for a CPU")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--steps", type=int, default=100)
    add_options(parser, PROVIDERS, len(PROVIDERS), 120)
    options = parser.parse_args()
    measure_each(options, measure)


if __name__ == "__main__":
    main()
