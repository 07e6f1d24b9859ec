"""Blocks whose backward Inductor fuses until registers spill: what ptxas says of their kernels, and their time.

    PYTHONPATH=. python benchmarks/guard.py [--json FILE]

Each block is compiled for an H200 without one, by Inductor's own rules, without mixed-order reductions, and under
`stepgraph.inductor.fusion_guard`: bytes that its backward's kernels spill, in the best of the configurations that
Inductor would time. On a GPU each is also timed as `torch.compile` runs it, forward and backward, in turns.
"""

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from stepgraph.config.environment import environment
from stepgraph.inductor import fusion_guard
from tests.inductor.choices import cuda_codegen

BF16, FP32 = torch.bfloat16, torch.float32
REPEATS, CALLS = 7, 10

#: Name -> Inductor's options. The guard's are asked for anew: its report is of one compilation.
RULES: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "no-mix-order": lambda: {"triton.mix_order_reduction": False},
    "guard": lambda: fusion_guard().options,
}


class Block(NamedTuple):
    """``layers`` residual branches over (rows, columns) in ``dtype``; matrix products are in bf16.

    plain: x + branch(norm(x)). scaled: a learned scale per channel on each branch. mixed: the stream, too, is scaled,
    and mixed with the embedding by a scale. parallel: two branches of one norm.
    """

    kind: str
    rows: int
    columns: int
    layers: int
    dtype: torch.dtype

    def specs(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the arguments."""
        scales = {"plain": 0, "scaled": 1, "mixed": 2, "parallel": 0}[self.kind]
        products = 2 if self.kind == "parallel" else 1
        layer = [((self.columns,), self.dtype)] * scales + [((self.columns, self.columns), BF16)] * products
        return [((self.rows, self.columns), self.dtype), *layer * self.layers]

    def __call__(self, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        def branch(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return h.to(BF16) @ weight

        columns = (self.columns,)
        x = embedding = F.rms_norm(x, columns)
        for some in zip(*[iter(parameters)] * (len(parameters) // self.layers), strict=True):
            h = F.rms_norm(x, columns)
            if self.kind == "plain":
                x = x + branch(h, *some)
            elif self.kind == "parallel":
                x = x + branch(h, some[0]) + branch(h, some[1])
            elif self.kind == "scaled":
                x = x + some[0] * branch(h, some[1])
            else:
                x = some[0] * x + some[1] * embedding
                x = x + branch(F.rms_norm(x, columns), some[2])
        return F.rms_norm(x, columns)


WIDTHS = (512, 1024, 2048)
KINDS = ("plain", "scaled", "mixed", "parallel")
BLOCKS = [
    Block(kind, 98304 * 512 // columns, columns, layers, dtype)
    for layers, kinds, dtypes in ((3, KINDS, (BF16, FP32)), (6, ("mixed",), (FP32,)))
    for kind in kinds
    for columns in WIDTHS
    for dtype in dtypes
]


class Output:
    """What C++ writes to this process's stdout, as pytest's ``capsys`` gives what Python writes."""

    def __init__(self) -> None:
        self.file, self.at = tempfile.TemporaryFile(), 0  # noqa: SIM115  (closed with the process)
        self.stdout = os.dup(1)
        os.dup2(self.file.fileno(), 1)

    def close(self) -> None:
        os.dup2(self.stdout, 1)

    def readouterr(self) -> Any:
        self.file.seek(self.at)
        text = self.file.read().decode()
        self.at = self.file.tell()
        return argparse.Namespace(out=text, err="")


def registers(block: Block, rule: str) -> dict[str, int]:
    """Kernels of backward, and the bytes that they spill together."""
    graph = cuda_codegen.trace(block, *block.specs())["backward"]
    scope = cuda_codegen.rules(fusion_guard()) if rule == "guard" else contextlib.nullcontext()
    off = torch._inductor.config.patch("triton.mix_order_reduction", rule != "no-mix-order")
    with off, scope:
        generated = cuda_codegen.generate(graph)
    output = Output()
    try:
        with tempfile.TemporaryDirectory() as folder:
            spilled = sum(kernel.spilled_bytes(Path(folder), output) for kernel in generated.kernels)
    finally:
        output.close()
    return {"kernels": len(generated.kernels), "spilled_bytes": spilled}


def milliseconds(block: Block) -> dict[str, float]:
    """Forward and backward of the block under each rule, in turns; the median."""
    arguments = [(0.02 * torch.randn(s, dtype=d, device="cuda")).requires_grad_() for s, d in block.specs()]
    dy = torch.randn_like(arguments[0])
    steps = {}
    for rule, options in RULES.items():
        torch.compiler.reset()
        compiled = torch.compile(lambda *a: block(*a), dynamic=False, fullgraph=True, options=options())
        steps[rule] = lambda compiled=compiled: torch.autograd.grad(compiled(*arguments), arguments, dy)
        steps[rule]()
    times: dict[str, list[float]] = {rule: [] for rule in steps}
    for _ in range(REPEATS):
        for rule, step in steps.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(CALLS):
                step()
            end.record()
            end.synchronize()
            times[rule].append(begin.elapsed_time(end) / CALLS)
    return {rule: round(median(some), 4) for rule, some in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", help="numbers of the blocks to look at; all without it")
    options = parser.parse_args()
    rows = []
    for block in [BLOCKS[i] for i in options.blocks or range(len(BLOCKS))]:
        row = block._asdict() | {"dtype": str(block.dtype).removeprefix("torch.")}
        row["registers"] = {rule: registers(block, rule) for rule in RULES}
        if torch.cuda.is_available():
            row["ms"] = milliseconds(block)
        rows.append(row)
        print(row, flush=True)
        if options.json:
            options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
