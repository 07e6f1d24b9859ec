"""Runs the kernels of experts in Triton's interpreter: ``python ..._child.py CASES.pt RESULTS.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stepgraph.kernels.moe import grouped_triton, route_triton, rows_triton, scaled_triton, swiglu_triton
from tests.kernels.triton_tools import interpret_masks

interpret_masks()

FUNCTIONS = {
    "sort": route_triton.launch,
    "gather": rows_triton.gather,
    "combine": rows_triton.combine,
    "combine_backward": rows_triton.combine_backward,
    "zero_past": grouped_triton.zero_past,
    "cast_groups": lambda *given: scaled_triton.launch(*given)[:2],
    "cast_packed": scaled_triton.launch_packed,
    "swiglu_cast": swiglu_triton.launch_cast,
    "swiglu_cast_backward": swiglu_triton.launch_cast_backward,
    "swiglu": swiglu_triton.launch,
    "swiglu_backward": swiglu_triton.launch_backward,
}
torch.save([FUNCTIONS[name](*arguments) for name, *arguments in torch.load(sys.argv[1])], sys.argv[2])
