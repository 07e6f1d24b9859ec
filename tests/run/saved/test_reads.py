"""What a trace reads, from wherever and by whatever means, is in the next start's step: it is traced there too."""

import collections
import copy
import functools
import importlib
import mmap
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import stepgraph

HELD = types.ModuleType("held")
NAMES = types.SimpleNamespace(here=lambda: 1.0, other=lambda: 2.0)


def by_mmap():
    with open("value", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return float(mapped[:])


def by_safetensors():
    with safe_open("value.safetensors", "np") as file:
        return file.get_tensor("value").item()


class Plain:
    def factor(self):
        return 1.0


class Base:
    def factor(self):
        return 2.0


class GainsABase(Plain):
    pass


#: How forward reads a number; `told` puts it there.
READS = {
    "sys.argv": lambda: float(sys.argv[-1]),
    "an environment variable": lambda: float(os.environ["OF_THE_TEST"]),
    "os.environb": lambda: float(os.environb[b"OF_THE_TEST"]),
    "a subprocess": lambda: float(subprocess.run(["cat", "value"], capture_output=True, check=True).stdout),
    "a file": lambda: float(Path("value").read_text()),
    "a mapped file": by_mmap,
    "safetensors": by_safetensors,
    "whether a file is there": lambda: 2.0 if os.path.exists("two") else 1.0,
    "the working directory": lambda: float(os.path.basename(os.getcwd())),
    "a folder's list": lambda: 2.0 if "two" in os.listdir() else 1.0,
    "a file's size": lambda: 2.0 if os.stat("size").st_size == 2 else 1.0,
    "an attribute patched onto NumPy": lambda: np.of_the_test,
    "a loop over a module's names": lambda: sum(v for v in vars(HELD).values() if isinstance(v, float)),
    "a class that gains a base": lambda: GainsABase().factor(),
    "a computed name": lambda: getattr(NAMES, "here" if os.environ["OF_THE_TEST"] == "1.0" else "oth" + "er")(),
    "a function with a cache": functools.cache(lambda: HELD.value),
    "a deque": lambda: HELD.queue[0],
}


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Puts a number wherever `READS` read it."""

    def told(value):
        folder = tmp_path / str(value)
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["program", str(value)])
        monkeypatch.setenv("OF_THE_TEST", str(value))
        monkeypatch.setattr(np, "of_the_test", value, raising=False)
        GainsABase.__bases__ = (Base, Plain) if value == 2 else (Plain,)
        vars(HELD).update(value=value, queue=collections.deque([value]))
        READS["a function with a cache"].cache_clear()
        (folder / "value").write_text(str(value))
        (folder / "size").write_text("x" * int(value))
        save_file({"value": torch.tensor(value)}, folder / "value.safetensors")
        if value == 2:
            (folder / "two").touch()

    return told


@pytest.mark.parametrize("what", READS)
def test_the_step_is_that_of_now(what, told, tmp_path):
    read = READS[what]
    for value, loaded in ((1.0, False), (1.0, True), (2.0, False), (1.0, True)):
        told(value)
        assert read() == value
        outcome = started(lambda model, x: model(x).square().mean() * read(), nn.Linear(3, 3), tmp_path / "steps")
        assert outcome.loaded == loaded and outcome.kept, outcome


def started(loss_fn, model, folder):
    """How a step came about whose loss is eager's."""
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, passes="exact", saved=folder)
    expected = loss_fn(copy.deepcopy(model), batch).detach()
    assert torch.equal(step(batch), expected), step.saved
    return step.saved


SOURCE = """
import torch

def scaled(x):
    return x * FACTOR

class Model(torch.nn.Linear):
    def forward(self, x):
        return scaled(super().forward(x))

FACTOR = VALUE
"""


def test_a_program_that_was_edited_has_its_own_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for value in ("1.0", "1.0", "2.0"):
        (tmp_path / "of_the_user.py").write_text(SOURCE.replace("VALUE", value))
        sys.modules.pop("of_the_user", None)
        importlib.invalidate_caches()
        model = importlib.import_module("of_the_user").Model(3, 3)
        found.append(started(lambda m, x: m(x).square().mean(), model, tmp_path / "steps").loaded)
    del sys.modules["of_the_user"]
    assert found == [False, True, False]
