"""Runs the kernel of `gram` in Triton's interpreter: ``python gram_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels import gram_triton
from tests.kernels.triton_tools import interpret_masks

interpret_masks()
torch.save([gram_triton.launch(*given) for given in torch.load(sys.argv[1])], sys.argv[2])
