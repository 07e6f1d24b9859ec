"""What tests of Triton kernels share where there is no GPU: the interpreter, and ptxas's word on a compiled kernel."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


def spills_allowed() -> int:
    """Bytes that a kernel may spill. Tiles were chosen with Triton 3.6, and spill nothing there, except that odd rows
    of a layer norm spill up to 16. With 3.7 RMS backward of rows of 11,008 spills 36, and layer norm's of rows of 192
    spills 56. With 3.8 and 3.9 RMS backward of rows from 16,384 on spills 16 to 80, and a cast to fp8 both ways 8."""
    version = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    return 80 if version >= (3, 8) else 56 if version == (3, 7) else 16


def interpret_masks() -> None:
    """Lets Triton 3.9's interpreter take the masks that it makes of a row and a scalar: truth values as integers, which
    it refuses. And the functions of a module patch the language once a launch, not at every call, which takes half of
    the time. For a program that runs kernels in the interpreter."""
    import numpy as np
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    launch, patch_language, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            return patch_language(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patch_once

    def patch(name: str, mask: int) -> None:
        method = getattr(InterpreterBuilder, name)

        def with_mask(self: Any, *args: Any) -> Any:
            args[mask].data = args[mask].data.astype(np.bool_)
            return method(self, *args)

        setattr(InterpreterBuilder, name, with_mask)

    patch("create_masked_load", 1)
    patch("create_masked_store", 2)


def interpreted(program: Path, folder: Path, cases: Sequence[Any]) -> Any:
    """The results of ``program``, which runs kernels in the interpreter, for ``cases``; files go to ``folder``."""
    torch.save(cases, folder / "cases.pt")
    root = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, program, folder / "cases.pt", folder / "results.pt"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}, timeout=300)
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("the interpreter of this Triton (3.6) does not work with this numpy (2.4)")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results.pt")


def assert_no_spills(
    kernel: Any, kinds: dict[str, str], constants: dict[str, Any], warps: int, aligned: Iterable[str] = ()
) -> str:
    """``kernel``, compiled for sm_90, spills no register, and its threads exchange no bytes; its PTX. ``kinds``: types
    of its parameters that are no constants. ``aligned``: those that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert not exchanged_bytes(compiled), f"{kernel.fn.__name__} {constants}"
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", os.devnull, "-"]
    report = subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True, check=True).stderr
    (stores,) = re.findall(r"(\d+) bytes spill stores", report)
    assert int(stores) <= spills_allowed(), f"{kernel.fn.__name__} {constants}, {warps} warps: {report}"
    return compiled.asm["ptx"]


def exchanged_bytes(compiled: Any) -> list[str]:
    """Where threads of a kernel give one another numbers of fp8, which ptxas of CUDA 12.8 puts in wrong places."""
    return re.findall(r"ttg.convert_layout .* tensor<\w+xf8\w+, .*", compiled.asm["ttgir"])
