"""Runs the kernels of the split cross entropy in Triton's interpreter: ``python ..._child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.loss.split_triton import launch_gradient, launch_parts
from tests.kernels.triton_tools import interpret_masks

interpret_masks()

results = []
for logits, log_sum, column, slope, config in torch.load(sys.argv[1]):
    parts = [launch_parts(logits, config) for _ in range(2)]
    slopes = logits.clone()
    launch_gradient(slopes, log_sum, column, slope, config)
    results.append((parts, slopes))
torch.save(results, sys.argv[2])
