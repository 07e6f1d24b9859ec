"""Runs the cross entropy kernel in Triton's interpreter: ``python cross_entropy_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.loss.cross_entropy_triton import launch
from tests.kernels.triton_tools import interpret_masks

interpret_masks()

results = []
for logits, targets, grad, mean, ignore, cap, config in torch.load(sys.argv[1]):
    runs = [logits.clone() for _ in range(2)]
    losses = [launch(run, targets, grad, mean, ignore, False, cap, config) for run in runs]
    results.append((losses, runs))
torch.save(results, sys.argv[2])
