"""Runs the casts to fp8 in Triton's interpreter: ``python fp8_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.fp8 import cast_triton, transpose_triton
from tests.kernels.triton_tools import interpret_masks

interpret_masks()
# Whole tiles and parts of one in few rows: the interpreter takes long for each program.
cast_triton.TILE, cast_triton.CAST_TALL, cast_triton.CAST_WIDE = 32, 32, 32
transpose_triton.TALL = transpose_triton.WIDE = 16
cast_triton.PAIRS_ROWS, cast_triton.PAIRS, cast_triton.PAIRS_CHUNK = 16, 16, 32

everything = []
for x, *options in torch.load(sys.argv[1]):
    if not options:
        everything.append(transpose_triton.launch(x))
        continue
    dtype, rows, columns, longest, by = options
    cast_triton.LONGEST = longest
    amax = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    casts = []
    for before in (False, True):  # transposed by the kernel, and before it
        cast_triton._transposed_before = lambda x, before=before: before
        casts.append(cast_triton.launch(x, amax, dtype, rows, columns))
        casts.append(cast_triton.launch_rows(x, dtype, rows, columns, by))
    everything.append(casts)
torch.save(everything, sys.argv[2])
