"""Runs the kernel of 4-bit weights in Triton's interpreter: ``python quant_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.quant.nf4_triton import launch
from tests.kernels.triton_tools import interpret_masks

interpret_masks()

torch.save([launch(*case) for case in torch.load(sys.argv[1])], sys.argv[2])
