"""Runs the kernels of experts in Triton's interpreter: ``python ..._child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.kernels.moe.launches import FUNCTIONS
from tests.kernels.triton_tools import interpret_masks

interpret_masks()

torch.save([FUNCTIONS[name](*arguments) for name, *arguments in torch.load(sys.argv[1])], sys.argv[2])
