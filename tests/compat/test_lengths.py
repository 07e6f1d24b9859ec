"""A trace with open sizes changes torch for its own thread alone."""

from concurrent.futures import ThreadPoolExecutor

from stepgraph.compat.lengths import SymbolicSizes, open_sizes

AS_INTEGER = True, "4", True


def looks_like(size):
    return isinstance(size, int), repr(size), hasattr(size, "real")


def test_another_thread_sees_torchs_sizes():
    (size,) = SymbolicSizes([4]).symbols
    plain = looks_like(size)
    with ThreadPoolExecutor() as other, open_sizes(lambda file: False):
        assert other.submit(looks_like, size).result() == plain != AS_INTEGER
        assert looks_like(size) == AS_INTEGER


def test_another_threads_trace_waits():
    def trace():
        with open_sizes(lambda file: False):
            return looks_like(size)

    (size,) = SymbolicSizes([4]).symbols
    with ThreadPoolExecutor() as other:
        with open_sizes(lambda file: False):
            waits = other.submit(trace)
            assert not waits.done()
        assert waits.result() == AS_INTEGER
    assert not looks_like(size)[0]
