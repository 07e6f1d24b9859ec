"""DPO with a frozen reference, compared with TRL and with Liger's kernels and loss.

Every provider trains the same model (random weights, bf16, AdamW) on the same pairs in a process of its own with empty
compile caches. A step is ``--pairs`` prompts with a chosen and a rejected answer each, all of ``--tokens`` tokens, of
which ``--prompt`` are the prompt. Tokens per second count both answers, and are those of the median step.

    python benchmarks/dpo.py --device cuda [--json FILE] [--providers NAME ...]
    python benchmarks/dpo.py --tiny                       # on a CPU, with the losses of all providers
"""

import argparse
import copy
import inspect
import itertools
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from children import START, add_options, measure_each, steps_reported, timed_steps
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback

import stepgraph
from stepgraph.kernels.loss import token_log_probs
from stepgraph.passes import StepOptions

PROVIDERS = (
    "stepgraph", "TRL, Liger", "stepgraph, TRL", "Liger's loss", "TRL, Liger, checkpointing", "TRL"
)  # fmt: skip
QWEN3_1_7B = dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16)
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
BETA, LR, CLIP, IGNORED, WORDS, EOS = 0.1, 1e-4, 1.0, -100, 256, 1


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    sizes = TINY if options.tiny else QWEN3_1_7B
    heads = dict(num_key_value_heads=sizes["num_attention_heads"] // 2, head_dim=32 if options.tiny else 128)
    ends = dict(pad_token_id=0, eos_token_id=EOS)
    config = Qwen3Config(vocab_size=options.vocab, tie_word_embeddings=True, **sizes, **heads, **ends)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config).to(getattr(torch, options.dtype))


def pairs_of(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """The pairs of the one batch that every step sees; answers end with EOS."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, WORDS, (count,), generator=generator).tolist()

    answer = options.tokens - options.prompt
    return [
        {"prompt": tokens(options.prompt), "chosen": tokens(answer - 1), "rejected": tokens(answer - 1)}
        for _ in range(options.pairs)
    ]


def batch_of(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """``ids`` (2 * pairs, T), the chosen answers first, and ``labels``, -100 for prompts."""
    pairs = pairs_of(options)
    ids = torch.tensor([pair["prompt"] + pair[kind] + [EOS] for kind in ("chosen", "rejected") for pair in pairs])
    labels = ids.clone()
    labels[:, : options.prompt] = IGNORED
    return {"ids": ids.to(options.device), "labels": labels.to(options.device)}


# Loops of their own


class Pair(nn.Module):
    """A policy next to its frozen reference."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)


def hidden_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.model(input_ids=batch["ids"], use_cache=False).last_hidden_state[:, :-1]


def dpo_loss(pair: Pair, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean of -log sigmoid(beta * ((chosen - its reference) - (rejected - its reference)))."""

    def log_probs(model: nn.Module) -> torch.Tensor:
        return token_log_probs(hidden_of(model, batch), model.lm_head.weight, batch["labels"][:, 1:]).sum(1)

    with torch.no_grad():
        reference = log_probs(pair.reference)
    chosen, rejected = (log_probs(pair.policy) - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def own_loop(name: str, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    if name.startswith("Liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(cross_entropy=False, fused_linear_cross_entropy=False)
    pair, batch = Pair(build(options)).train(), batch_of(options)
    optimizer = torch.optim.AdamW(pair.policy.parameters(), lr=LR, weight_decay=0.0, fused=True)
    if name == "stepgraph":
        passes = StepOptions(options.passes, memory=options.memory)
        step = stepgraph.capture(pair, dpo_loss, batch, optimizer, max_grad_norm=CLIP, passes=passes)
    else:
        step = _liger_step(pair, optimizer)
    return timed_steps(lambda number: step(batch).item(), options.steps)


def _liger_step(pair: Pair, optimizer: torch.optim.Optimizer) -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    known = inspect.signature(LigerFusedLinearDPOLoss).parameters
    sums = {"average_log_prob": False} if "average_log_prob" in known else {}
    fused = LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=True, **sums)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            reference = hidden_of(pair.reference, batch)
        weights = pair.policy.lm_head.weight, pair.reference.lm_head.weight
        hidden, labels = hidden_of(pair.policy, batch), batch["labels"][:, 1:].contiguous()
        found = fused(weights[0], hidden, labels, ref_input=reference, ref_weight=weights[1])
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
        nn.utils.clip_grad_norm_(pair.policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# TRL


class Times(TrainerCallback):
    """When each step ended, on the device."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter() - START)
        if len(self.ends) == 1:
            steps_reported([], self.ends)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": EOS, "<unk>": 2} | {f"w{i}": i for i in range(3, WORDS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def with_trl(name: str, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    captured = name.startswith("stepgraph")
    texts = [{kind: " ".join(f"w{i}" for i in ids) for kind, ids in pair.items()} for pair in pairs_of(options)]
    texts = [pair | {kind: " " + pair[kind] for kind in ("chosen", "rejected")} for pair in texts]
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder, report_to=[], disable_tqdm=True, per_device_train_batch_size=options.pairs,
            max_steps=options.steps, save_strategy="no", logging_steps=1, beta=BETA, learning_rate=LR,
            lr_scheduler_type="constant", max_grad_norm=CLIP, max_length=options.tokens, optim="adamw_torch_fused",
            bf16=False, use_cpu=options.device == "cpu", gradient_checkpointing="checkpointing" in name,
            use_liger_kernel="Liger" in name, dataloader_pin_memory=options.device == "cuda",
        )  # fmt: skip
        own: dict[str, Any] = {}
        base = DPOTrainer
        if captured:
            from stepgraph.integrations import GraphStep

            base = type("GraphDPO", (GraphStep, DPOTrainer), {})
            own = {"passes": StepOptions(options.passes, memory=options.memory)}
        policy, times = build(options), Times()
        trainer = base(
            model=policy, ref_model=copy.deepcopy(policy), args=args, train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer(), callbacks=[times], **own,
        )  # fmt: skip
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], times.ends


# All


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One provider."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    losses, ends = (with_trl if "TRL" in name else own_loop)(name, options)
    steps = [b - a for a, b in itertools.pairwise(ends[2:])]
    cuda = options.device == "cuda"
    return {
        "tokens_per_s": round(2 * options.pairs * options.tokens / statistics.median(steps)),
        "step_ms": round(1e3 * statistics.median(steps), 1),
        "first_step_s": round(ends[0], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers and short pairs, for a CPU")
    parser.add_argument("--dtype", default=None, help="default: bfloat16, float32 with --tiny")
    parser.add_argument("--pairs", type=int, default=None, help="default: 8, 2 with --tiny")
    parser.add_argument("--tokens", type=int, default=None, help="of a prompt and an answer; default: 1024")
    parser.add_argument("--prompt", type=int, default=None, help="default: an eighth of the tokens")
    parser.add_argument("--vocab", type=int, default=None, help="default: 151936, 1000 with --tiny")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--memory", default="none", help="the memory policy of stepgraph's steps")
    parser.add_argument("--passes", default=None, help="of stepgraph's steps; default: default, exact with --tiny")
    add_options(parser, PROVIDERS, len(PROVIDERS), 120)
    options = parser.parse_args()
    defaults = ("float32", 2, 64, 1000, "exact") if options.tiny else ("bfloat16", 8, 1024, 151936, "default")
    for key, value in zip(("dtype", "pairs", "tokens", "vocab", "passes"), defaults, strict=True):
        vars(options)[key] = vars(options)[key] or value
    options.prompt = options.prompt or options.tokens // 8
    if options.steps < 5:
        parser.error(f"--steps {options.steps}; the first three are not timed: give at least 5")
    measure_each(options, measure)


if __name__ == "__main__":
    main()
