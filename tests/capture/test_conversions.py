"""No conversion of a tensor to numbers of Python, in code of any kind, becomes a constant of a captured step."""

import array
import ctypes
import math
import operator
import struct

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph

#: What is made of a float ``f`` and an integer ``n``, tensors of one element each, and of vectors ``fs`` and ``ns``.
CONVERSIONS = {
    "Tensor": lambda f, n, fs, ns: torch.Tensor([f, 1.0]).sum() + torch.Tensor((f, n)).sum(),
    "Tensor of integers": lambda f, n, fs, ns: torch.Tensor([[n], [2]]).sum(),
    "FloatTensor": lambda f, n, fs, ns: torch.FloatTensor([f, 1.0]).sum() + torch.HalfTensor([f]).sum(),
    "LongTensor": lambda f, n, fs, ns: torch.LongTensor([n, 1]).sum() + torch.BoolTensor([n > 2]).sum(),
    "new": lambda f, n, fs, ns: fs.new([f, 1.0]).sum() + fs.new_tensor([f]).sum(),
    "tensor": lambda f, n, fs, ns: torch.tensor([f, 1]).sum() + torch.tensor(((n,), (2,))).sum(),
    "asarray": lambda f, n, fs, ns: torch.asarray([f]).sum() + torch.as_tensor([[f]]).sum() + torch.scalar_tensor(f),
    "complex": lambda f, n, fs, ns: torch.tensor([f, 1j]).real.sum() + complex(f).real + complex(f, f).imag,
    "bfloat16": lambda f, n, fs, ns: torch.tensor([f], dtype=torch.bfloat16).float().sum(),
    "elements": lambda f, n, fs, ns: torch.tensor([fs[0:1], fs[1:2]]).sum() + sum(map(float, fs)),
    "sizes": lambda f, n, fs, ns: torch.ones(n, 2).sum() + torch.zeros(12).view(n, -1).shape[1] + torch.arange(n).sum(),
    "Size": lambda f, n, fs, ns: torch.Size((n, n)).numel() + torch.Size(ns).numel() + torch.Tensor(n, 2).numel(),
    "tensor_split": lambda f, n, fs, ns: torch.arange(9.0).tensor_split(ns)[1].sum(),
    "tensor_split by name": lambda f, n, fs, ns: torch.tensor_split(torch.ones(9), tensor_indices_or_sections=n)[
        0
    ].sum(),
    "slices": lambda f, n, fs, ns: (
        [1.0, 2.0, 3.0, 4.0][n] + sum([1.0, 2.0, 3.0, 4.0][:n]) + torch.arange(9.0)[n:].sum()
    ),
    "repeats": lambda f, n, fs, ns: len([0] * n) + len("a" * n) + len(bytes(n)) + sum(range(n)),
    "index": lambda f, n, fs, ns: operator.index(n) + int(hex(n), 16) + np.arange(9)[n],
    "math": lambda f, n, fs, ns: math.sqrt(f) + math.floor(f) + math.comb(5, n) + math.fsum(fs) + math.hypot(f, f),
    "format": lambda f, n, fs, ns: float(f"{f:.2f}") + float(format(f, ".1f")),
    "truth": lambda f, n, fs, ns: float(f > 2.5) + (not (f - 2)) + (3 in ns) + [1, 2, 3].count(n) + float(max(ns)),
    "struct": lambda f, n, fs, ns: struct.unpack("f", struct.pack("f", f.item()))[0] + sum(array.array("f", [f, f])),
    "numpy": lambda f, n, fs, ns: np.float32(f) + np.full(int(n), 2.0).sum() + np.array([f, 1.0]).sum(),
    "ctypes": lambda f, n, fs, ns: ctypes.c_float(f).value,
    "tolist": lambda f, n, fs, ns: sum(fs.tolist()) + sum(ns.tolist()),
}
#: What reads memory, which a tensor of the trace does not have.
OF_MEMORY = {
    "array": lambda f, n, fs, ns: fs.numpy()[0] + np.asarray(fs)[1] + np.array(fs).sum(),
    "dlpack": lambda f, n, fs, ns: np.from_dlpack(fs)[1],
    "text": lambda f, n, fs, ns: float(str(fs)[8]) + float(repr(f)[7]),
    "address": lambda f, n, fs, ns: ctypes.c_float.from_address(fs.data_ptr()).value,
}


class Reads(nn.Module):
    """The gradient of ``weight`` is what a conversion gives."""

    def __init__(self, read):
        super().__init__()
        self.read, self.weight = read, nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch):
        return self.weight * self.read(batch)


def elements(fs, ns):
    return fs[0], ns[0], fs, ns


CASES = [(source, name) for source in ("outside", "made of it", "batch") for name in CONVERSIONS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("source", "name"), CASES + [("outside", name) for name in OF_MEMORY])
def test_no_conversion_of_a_tensor_becomes_a_constant(source, name):
    convert = (CONVERSIONS | OF_MEMORY)[name]
    fs, ns = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    held = elements(fs, ns)
    arguments = {
        "outside": lambda batch: held,
        "made of it": lambda batch: elements(fs + 0, ns + 0),
        "batch": lambda batch: elements(batch["ns"].float(), batch["ns"]),
    }[source]
    model = Reads(lambda batch: convert(*arguments(batch)))
    step = None
    for first in (2, 3):
        batch = {"ns": torch.tensor([first, 4, 6])}
        fs.copy_(batch["ns"])
        ns.copy_(batch["ns"])
        step = step or stepgraph.capture(model, lambda model, batch: model(batch), batch, passes="exact")
        model.weight.grad = None
        step(batch)
        assert model.weight.grad == model.read(batch)


@pytest.mark.parametrize("name", OF_MEMORY)
def test_memory_that_a_trace_does_not_have_is_refused(name):
    model = Reads(lambda batch: OF_MEMORY[name](*elements(batch["fs"] + 0, batch["fs"])))
    with pytest.raises(stepgraph.CaptureError, match=r"needs a tensor's value|address"):
        stepgraph.capture(model, lambda model, batch: model(batch), {"fs": torch.ones(3)}, passes="exact")
