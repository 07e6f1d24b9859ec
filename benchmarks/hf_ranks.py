"""Unmodified Hugging Face models on several GPUs: `GraphTrainer` next to transformers' ``Trainer`` with FSDP2.

Each provider of each model runs in processes of its own, which torchrun starts. Weights are random, in the published
shapes; nothing is downloaded. Parameters are fp32 shards that are used in bf16 (``TrainingArguments(bf16=True)``), the
optimizer is torch's fused AdamW, gradients are clipped. ``Trainer`` keeps gathered parameters until backward, which is
its faster way; ``--reshard`` frees them. Prints one line of JSON per row, then all with the environment.

    python benchmarks/hf_ranks.py --ranks 2 > hf_ranks.json
    python benchmarks/hf_ranks.py --tiny --steps 3 --warmup 2       # two CPU ranks
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

#: Published sizes: (class of the configuration, its arguments, batch per GPU, the layer that FSDP2 wraps).
MODELS = {
    "qwen3-1.7b": (
        "Qwen3Config",
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        4,
        "Qwen3DecoderLayer",
    ),
    "llama-3.2-3b": (
        "LlamaConfig",
        {
            "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        },
        2,
        "LlamaDecoderLayer",
    ),
}  # fmt: skip
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
#: What is measured: options of ``TrainingArguments``.
PROVIDERS = {
    "trainer": {},
    "trainer-compile": {"torch_compile": True},
    "trainer-liger": {"use_liger_kernel": True},
    "stepgraph": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--ranks", type=int, default=2, help="GPUs; fsdp shards over all of them")
    parser.add_argument("--batch", type=int, help="sequences per GPU and step, in place of the model's own")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=8, help="steps before them")
    parser.add_argument("--rounds", type=int, default=1, help="how often every provider runs, in turns")
    parser.add_argument("--timeout", type=float, default=560, help="seconds for one provider of one model")
    parser.add_argument("--reshard", action="store_true", help="Trainer frees gathered parameters after forward")
    parser.add_argument("--tiny", action="store_true", help="small models on CPU ranks, to try the script")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "PROVIDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(*options.child, options)
        return
    from stepgraph.config.environment import environment, package_version

    rows = []
    for _ in range(options.rounds):
        for model in options.models:
            for provider in options.providers:
                rows.append(run(model, provider, options))
                print(json.dumps(rows[-1]), flush=True)
    packages = {name: package_version(name) for name in ("transformers", "accelerate", "liger-kernel")}
    print(json.dumps({"rows": rows, "packages": packages, "environment": environment()}), flush=True)


def run(model: str, provider: str, options: argparse.Namespace) -> dict:
    """The row of one provider, from processes of its own; where they fail, their last words."""
    row = {"model": model, "provider": provider, "ranks": options.ranks}
    given = [*sys.argv[1:], "--child", model, provider]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    print(f"{model}, {provider}: starts", file=sys.stderr, flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*command, __file__, *given], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            answer = process.communicate(timeout=options.timeout)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.communicate(timeout=60)
            return row | {"failed": f"no result within {options.timeout:g} s"}
        found = [line for line in answer.splitlines() if line.startswith("{") and '"tokens_per_s_per_gpu"' in line]
        if process.returncode or not found:
            errors.seek(0)
            words = [line for line in errors.read().splitlines() if re.search(r"Error: ", line)]
            return row | {"failed": (words or [f"exit status {process.returncode}"])[0].strip()[:500]}
    return row | json.loads(found[-1]) | {"total_s": round(time.perf_counter() - start, 1)}


def measure(model: str, provider: str, options: argparse.Namespace) -> None:
    """On each rank: train, and print on rank 0 what a step took."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from stepgraph.integrations import GraphTrainer

    config, sizes, batch, layer = MODELS[model]
    batch, gpu = options.batch or batch, not options.tiny
    steps = options.warmup + options.steps
    seq_len = 64 if options.tiny else options.seq_len
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=1e-4, bf16=True,
            fsdp=True, fsdp_config={
                "version": 2, "reshard_after_forward": options.reshard, "transformer_layer_cls_to_wrap": [layer],
            },
            optim="adamw_torch_fused", logging_steps=steps, logging_nan_inf_filter=False, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=options.tiny, **PROVIDERS[provider],
        )  # fmt: skip
        torch.manual_seed(0)
        with arguments.device:
            shape = sizes | (TINY if options.tiny else {})
            built = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, config)(**shape), attn_implementation="sdpa", dtype=torch.float32
            )
        clock = _clock(TrainerCallback, options.warmup, gpu)
        rows = torch.randint(shape["vocab_size"], (steps * batch * options.ranks, seq_len))
        kind = GraphTrainer if provider == "stepgraph" else Trainer
        trainer = kind(
            model=built, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[clock],
        )  # fmt: skip
        began = time.perf_counter()
        result = trainer.train()
    step_s = (clock.ended - clock.began) / options.steps
    if trainer.is_world_process_zero():
        row = {
            "batch": batch,
            "seq_len": seq_len,
            "tokens_per_s_per_gpu": batch * seq_len / step_s,
            "step_ms": 1000 * step_s,
            "first_step_s": clock.first - began,
            "train_loss": result.training_loss,
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if gpu else None,
            "gpu": torch.cuda.get_device_name() if gpu else None,
        }
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def _clock(callback: type, warmup: int, gpu: bool):
    """A callback that notes when the first step, the last one before those that are timed, and the last one end."""

    class Clock(callback):
        first = began = ended = 0.0

        def on_step_end(self, args, state, control, **_):
            if state.global_step in (1, warmup, state.max_steps):
                if gpu:
                    torch.cuda.synchronize()
                now = time.perf_counter()
                self.first = self.first or now
                self.began = self.began or (now if state.global_step == warmup else 0.0)
                self.ended = now

    return Clock()


if __name__ == "__main__":
    main()
