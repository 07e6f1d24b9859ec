"""Runs the kernels of `counted` in Triton's interpreter: ``python counted_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.loss import counted_triton as own
from stepgraph.kernels.loss.cross_entropy_triton import launch as cross_entropy
from tests.kernels.triton_tools import interpret_masks

interpret_masks()
results = []
for x, weight, bias, targets, total, end, first, tile in torch.load(sys.argv[1]):
    own.WIDE = own.WIDE._replace(**tile)
    V = weight.shape[1]
    logits = own.launch_logits(x, weight, bias, end, first)
    before = logits.clone()
    loss = cross_entropy(logits[:, :V], targets, torch.tensor(0.5), False, -100, ordered=True)
    dw, fresh = total.clone(), torch.full_like(total, torch.nan)
    own.launch_dw(dw, logits, x, end, first, True)
    own.launch_dw(fresh, logits, x, end, first, False)
    dx, db = own.launch_dx(logits, weight.t(), end, first), own.launch_db(logits, end, first)
    results.append((before, loss, logits, dx, dw, fresh, db))
torch.save(results, sys.argv[2])
