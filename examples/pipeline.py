"""A pipeline of two stages in your own loop: each rank holds half of the blocks.

CPU, a few seconds:  torchrun --nproc-per-node 2 examples/pipeline.py
Two GPUs:            torchrun --nproc-per-node 2 examples/pipeline.py --device cuda --layers 16 --dim 2048 --steps 200

One microbatch is captured once and cut into stages. On a CPU losses are bitwise those of accumulation on one rank. The
bubble of a schedule is forecast without GPUs by `stepgraph plan llama3-8b --mesh pp=2`.
"""

import argparse

import torch

import stepgraph
from stepgraph import models, parallel
from stepgraph.parallel import MeshSpec, started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b", choices=parallel.SCHEDULES)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    heads = max(args.dim // 128, 4)
    sizes = {"dim": args.dim, "n_layers": args.layers, "n_heads": heads, "n_kv_heads": heads, "ffn_dim": 4 * args.dim}
    config = models.Llama3Config(vocab_size=256, max_seq_len=128, rope_theta=10_000.0, **sizes)
    microbatch = {key: torch.zeros(1, 64, dtype=torch.int64) for key in ("tokens", "targets")}

    with started(MeshSpec.parse("pp=2"), args.device) as mesh:
        with torch.device("meta"):
            model = models.Llama3(config)
        pipeline = parallel.plan_pipeline(model, models.next_token_loss, microbatch, mesh, args.schedule)
        parallel.parallelize(model, mesh, device=args.device, pipeline=pipeline)
        model.init_weights(0, parallel.local_parts(model))
        held = parallel.held_parameters(model)
        print(f"rank {torch.distributed.get_rank()}: {sum(p.numel() for p in held.values()):,} parameters", flush=True)

        optimizer = torch.optim.AdamW(held.values(), lr=1e-3, fused=True)
        torch.manual_seed(0)  # every rank gives the whole batch
        tokens = torch.randint(256, (args.microbatches, 65), device=args.device)
        batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        step = stepgraph.capture(
            model,
            parallel.next_token_loss(mesh),
            batch,
            optimizer,
            accumulate=args.microbatches,
            passes="exact" if args.device == "cpu" else "default",
        )
        for number in range(1, args.steps + 1):
            loss = step(batch)
            if torch.distributed.get_rank() == 0 and number in (1, args.steps):
                print(f"step {number}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
