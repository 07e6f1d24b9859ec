"""Runs the kernels of GELU in Triton's interpreter: ``python gelu_child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels import gelu_rows_triton
from tests.kernels.triton_tools import interpret_masks

interpret_masks()


def run(*given):
    if len(given) == 2:
        return gelu_rows_triton.launch(*given)
    return gelu_rows_triton.launch_backward(*given)


torch.save([run(*given) for given in torch.load(sys.argv[1])], sys.argv[2])
