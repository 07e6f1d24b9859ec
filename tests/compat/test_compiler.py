"""Inductor's compile workers: waited for where they were started, and no longer than said."""

import pytest
from torch._inductor import async_compile

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
