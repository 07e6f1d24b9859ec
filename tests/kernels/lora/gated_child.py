"""Runs the kernels of `gated` in Triton's interpreter: ``python gated_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.lora import gated_triton
from tests.kernels.triton_tools import interpret_masks

interpret_masks()
gated_triton.FORWARD, gated_triton.BACKWARD = (16, 16, 32, 4), (16, 16, 32, 2, 4)
everything = []
for *forward, dh, dt, scales in torch.load(sys.argv[1]):
    both = gated_triton.launch(*forward, *scales)
    *others, a = forward
    everything.append((*both, *gated_triton.launch_backward(dh, *others, dt, a, *scales)))
torch.save(everything, sys.argv[2])
