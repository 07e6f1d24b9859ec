"""Runs the kernel of `concat_sums` in Triton's interpreter: ``python concat_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels import concat_sums_triton
from tests.kernels.triton_tools import interpret_masks

interpret_masks()
torch.save([concat_sums_triton.launch(*given) for given in torch.load(sys.argv[1])], sys.argv[2])
