"""What tests of Triton kernels share where there is no GPU: the interpreter, and ptxas's word on a compiled kernel."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


def interpreted(program: Path, folder: Path, cases: Sequence[Any]) -> Any:
    """The results of ``program``, which runs kernels in the interpreter, for ``cases``; files go to ``folder``."""
    torch.save(cases, folder / "cases.pt")
    root = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, program, folder / "cases.pt", folder / "results.pt"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}, timeout=300)
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("the interpreter of this Triton (3.6) does not work with this numpy (2.4)")
    if "mask has unsupported dtype" in done.stderr:
        pytest.skip("the interpreter of this Triton (3.9) takes no mask that a comparison of 64-bit scalars is part of")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results.pt")


def assert_no_spills(
    kernel: Any, kinds: dict[str, str], constants: dict[str, Any], warps: int, aligned: Iterable[str] = ()
) -> None:
    """``kernel``, compiled for sm_90, spills no register. ``kinds``: types of its parameters that are no constants.
    ``aligned``: those that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", os.devnull, "-"]
    report = subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills == [("0", "0")], f"{kernel.fn.__name__} {constants}, {warps} warps: {report}"
