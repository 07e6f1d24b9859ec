"""Products of training steps by torch's algorithm and by the fastest of cuBLASLt's that gives the same bits.

    PYTHONPATH=. python benchmarks/products.py [--json FILE]

What the pass `tune_products` would choose, in bf16: of each linear layer (rows x inputs -> outputs) the product, the
gradient of its input and that of its weight. Needs a GPU; microseconds, medians of calls in turns.
"""

import argparse
import json
from pathlib import Path

import torch

from stepgraph.config.environment import environment
from stepgraph.kernels.cublas_lt import Problem, choose, unavailable

#: Model -> (rows, width, inner width of the MLP).
MODELS = {
    "nanoGPT 124M": (32768, 768, 3072),
    "GPT-2 medium": (16384, 1024, 4096),
    "ViT-L": (25216, 1024, 4096),
    "Qwen3-0.6B": (16384, 1024, 3072),
    "Llama 3.2 1B": (16384, 2048, 8192),
    "Llama 3 8B": (8192, 4096, 14336),
}


def problems(rows: int, inputs: int, outputs: int) -> dict[str, Problem]:
    """The three products of a linear layer without bias: x (rows, inputs), W (outputs, inputs), dy (rows, outputs)."""

    def problem(m: int, n: int, k: int, turned: tuple[bool, bool], strides: tuple[int, int]) -> Problem:
        return Problem(m, n, k, torch.bfloat16, turned, strides, False, 0)

    return {
        "y": problem(rows, outputs, inputs, (False, True), (inputs, inputs)),  # x @ W^T
        "dx": problem(rows, inputs, outputs, (False, False), (outputs, inputs)),  # dy @ W
        "dW": problem(outputs, inputs, rows, (True, False), (outputs, inputs)),  # dy^T @ x
    }


def main() -> None:
    """Print one line for each product."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times a GPU's products, and there is none: run it on a machine with an NVIDIA GPU")
    if why := unavailable():
        parser.error(why)
    rows = []
    for model, (tokens, width, inner) in MODELS.items():
        for layer, inputs, outputs in (("up", width, inner), ("down", inner, width), ("square", width, width)):
            for what, problem in problems(tokens, inputs, outputs).items():
                found = choose(problem)
                rates = [problem.flops / us / 1e6 for us in (found.torch_us, found.best_us)]
                rows.append(
                    {"model": model, "layer": layer, "product": what, "shape": [problem.m, problem.k, problem.n]}
                    | {"torch_us": found.torch_us, "best_us": found.best_us, "tflops": rates}
                )
                gain = found.torch_us / found.best_us
                print(
                    f"{model:13} {layer:7}{what:3} {problem!s:22} {found.torch_us:7.0f} us {rates[0]:4.0f} TFLOP/s -> "
                    f"{found.best_us:6.0f} us {rates[1]:4.0f}  {gain:.2f}x",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
