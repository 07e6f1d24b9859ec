"""Runs the kernels of `tokens` in Triton's interpreter: ``python tokens_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.loss import tokens_triton as kernels
from tests.kernels.triton_tools import interpret_masks

interpret_masks()

results = []
for logits, other, labels, slopes, scale, config in torch.load(sys.argv[1]):
    stats = kernels.launch_stats(logits, labels, scale, -100, config=config)
    assert all(map(torch.equal, stats, kernels.launch_stats(logits, labels, scale, -100, config=config))), "equal bits"
    kl = kernels.launch_kl(logits, other, scale, config)
    written = logits.clone(), logits.clone(), other.clone()
    kernels.launch_gradient(written[0], labels, *stats[1:3], *slopes, scale, -100, config=config)
    kernels.launch_kl_gradient(written[1], other, kl[1], kl[2], kl[0], slopes[0], scale, True, config=config)
    kernels.launch_kl_gradient(written[2], logits, kl[2], kl[1], kl[0], slopes[0], scale, False, config=config)
    results.append((stats, kl, written))
torch.save(results, sys.argv[2])
