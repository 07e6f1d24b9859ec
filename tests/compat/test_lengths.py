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
