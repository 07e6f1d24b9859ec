"""Inductor's compile workers: waited for where they were started, and no longer than said. What it asks of a CPU."""

import functools
import os
import platform
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from torch._inductor import async_compile, config, cpu_vec_isa
from torch._inductor.standalone_compile import CompiledArtifact

from stepgraph import compat
from stepgraph.compat import compiler


@pytest.fixture
def waits(monkeypatch):
    """The limits that were waited for; the workers do not become ready within 3 seconds."""
    limits = []

    def wait(timeout):
        limits.append(timeout)
        if timeout < 3:
            raise TimeoutError

    monkeypatch.setattr(async_compile.AsyncCompile, "wait_pool_ready", wait)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: None)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(compiler, "_workers_started", False)
    return limits


def test_workers_that_were_started_are_waited_for(waits):
    compat.await_compile_workers()
    assert waits == []
    compat.start_compile_workers()
    compat.await_compile_workers()
    compat.await_compile_workers(limit_s=1)
    assert waits == [30, 1]


def test_one_thread_has_no_workers(waits, monkeypatch):
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    compat.start_compile_workers()
    compat.await_compile_workers()
    assert waits == []


def test_compile_workers_end_at_once_whatever_they_do():
    """Torch would wait for them at the end of the process."""
    code = (
        "import os, time, torch\n"
        "from torch._inductor import async_compile\n"
        "from stepgraph import compat\n"
        "compat.start_compile_workers()\n"
        "pool = async_compile.AsyncCompile.process_pool()\n"
        "pool.submit(os.getpid).result(300)\n"
        "task = pool.submit(time.sleep, 1000)\n"
        "time.sleep(0.1)\n"
        "compat.end_compile_workers()\n"
        "assert pool.process.wait(100) == -9\n"
        "print(time.monotonic(), flush=True)\n"
    )
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert time.monotonic() - float(done.stdout) < 100 and not done.stderr


class Instructions:
    """A CPU's vector instructions, which are ``tried`` with the C++ compiler."""

    def __init__(self, name, works, tried):
        self.name, self.works, self.tried = name, works, tried

    def __str__(self):
        return self.name

    def __bool__(self):
        self.tried.append(self.name)
        return self.works


def test_only_the_vector_instructions_that_are_taken_are_tried(monkeypatch):
    tried = []
    known = [Instructions(name, name != "refused", tried) for name in ("absent", "refused", "best", "other")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["refused", "best", "other"])
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_vec_isa.sys, "platform", "linux")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    every = functools.cache(cpu_vec_isa.valid_vec_isa_list.__wrapped__)  # torch's, which keeps nothing of this test
    for _ in range(2):
        assert compiler._vector_instructions(every) == [known[2]] and tried == ["refused", "best"]
    assert cpu_vec_isa.supported_vec_isa_list is known
    with config.patch({"cpp.simdlen": 256}):  # any of them
        assert compiler._vector_instructions(every) == known[2:]
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert compiler._vector_instructions(every) == known[2:]


def test_loading_tries_no_more_vector_instructions_than_compiling(monkeypatch):
    used, function = [], object()

    def load(**_):
        used.append(cpu_vec_isa.valid_vec_isa_list.func)
        return SimpleNamespace(_compiled_fn=lambda *args: function(list(args)))

    monkeypatch.setattr(CompiledArtifact, "load", load)
    assert compiler.inductor_load(b"") is function and used == [compiler._vector_instructions]
