"""An unmodified mixture of experts of transformers over two ranks: each rank holds half of the experts.

CPU, a few seconds:       torchrun --nproc-per-node 2 examples/moe_ranks.py
Two GPUs, a real model:   torchrun --nproc-per-node 2 examples/moe_ranks.py --model FOLDER --device cuda --steps 200

Tokens travel to the ranks of their experts and back by collectives that are nodes of the step's graph. No token is
dropped: a step that needs larger buffers is repeated with them, and `repeated` counts that.
"""

import argparse
from pathlib import Path

import torch
import transformers

import stepgraph
from stepgraph.parallel import MeshSpec, mean_over_mesh, parallelize, started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a Qwen3-MoE or similar; default: a tiny one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)  # all ranks start from the same weights
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    else:
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16}
        config = transformers.Qwen3MoeConfig(vocab_size=256, **sizes, **experts)
        model = transformers.AutoModelForCausalLM.from_config(config)

    with started(MeshSpec.parse("fsdp=2,ep=2"), args.device) as mesh:
        rank = torch.distributed.get_rank()
        parallelize(model, mesh, device=args.device, expert_capacity=2.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        torch.manual_seed(rank)  # each rank has a batch of its own
        batch = {"tokens": torch.randint(256, (4, args.length), device=args.device)}
        step = stepgraph.capture(
            model,
            lambda model, batch: mean_over_mesh(model(input_ids=batch["tokens"], labels=batch["tokens"]).loss, mesh),
            batch,
            optimizer,
            max_grad_norm=1.0,
            passes="exact" if args.device == "cpu" else "default",
        )
        for number in range(1, args.steps + 1):
            loss = step(batch)
            if rank == 0 and number in (1, args.steps):
                print(f"step {number}: loss {loss.item():.4f}, repeated {step.metrics['repeated']}")


if __name__ == "__main__":
    main()
