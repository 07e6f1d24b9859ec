"""Imported by the process that forks ranks: what ranks import is imported once, not once a rank, and Python's collector
leaves it alone in every rank, as in `tests.conftest`."""

import contextlib
import gc
import importlib

NAMES = ["stepgraph.train.trainer", "torch._dynamo", "numpy.random", "triton.runtime", "pytest", "hypothesis", "peft"]
NAMES += ["tests.distributed.ranks", "tests.distributed.hf_ranks", "tests.models.moe_models"]

gc.disable()
for name in NAMES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze(), gc.set_threshold(20_000), gc.enable()
