"""Generated programs of views, splits, writes and casts train as in eager, bit for bit, after the exact passes.

Each test draws with another emphasis. In CI the draws are the same every time; `test_fresh_programs` draws new ones.
"""

import pytest

from tests.passes import generated_programs as programs

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

EXAMPLES = 10
VIEWS = [*programs.SPLITS, *programs.STRIDED, *programs.RESHAPES]


def lines(*names: str) -> st.SearchStrategy:
    """Programs of operators ``names``."""
    place, number = st.integers(0, 9), st.integers(0, 5)
    return st.lists(st.tuples(st.sampled_from(names), place, place, number, number), min_size=2, max_size=12)


def check(program: list, optimizer: bool, memory: str) -> None:
    kept = programs.valid(program)
    hypothesis.assume(kept is not None)
    programs.compare(kept, optimizer=optimizer, memory=memory)


def generated(*names: str, examples: int = EXAMPLES, derandomize: bool = True):
    """A test of programs of operators ``names``. A failing one is printed as drawn: to shrink it takes minutes."""
    settings = hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=derandomize, database=None, print_blob=not derandomize,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    draws = hypothesis.given(
        lines(*names), st.booleans(), st.sampled_from(["none", "selective", "full", "*=offload", "full,*=offload"])
    )
    return lambda test: settings(draws(test))


@generated(*programs.SPLITS, *programs.SPLITS, "cat", "stack", "add", "sin")
def test_splits_of_splits(program, optimizer, memory):
    check(program, optimizer, memory)


@generated(*programs.STRIDED, *programs.SPLITS, "mul", "sum")
def test_strided_views(program, optimizer, memory):
    check(program, optimizer, memory)


@generated(*programs.RESHAPES, "chunk", "select", "mul", "mean")
def test_reshapes(program, optimizer, memory):
    check(program, optimizer, memory)


@generated(*programs.WRITES, *programs.SPLITS, "clone", "mul", "scale", "view_same", "detach")
def test_writes_through_splits(program, optimizer, memory):
    check(program, optimizer, memory)


@generated(*programs.WRITES, *programs.STRIDED, *programs.RESHAPES, "sin", "cast")
def test_writes_through_views(program, optimizer, memory):
    check(program, optimizer, memory)


@generated(*programs.CASTS, *programs.CASTS, "mul_", "write_part", "write_chunk", "chunk", "mul", "transpose", "detach")
def test_casts(program, optimizer, memory):
    check(program, optimizer, memory)


@generated(*programs.RESHAPED_IN_PLACE, *VIEWS, "clone", "mul", "write_part")
def test_tensors_reshaped_in_place(program, optimizer, memory):
    check(program, optimizer, memory)


@generated(*programs.OPERATORS, *programs.MATHS)
def test_programs_of_all_operators(program, optimizer, memory):
    check(program, optimizer, memory)


@pytest.mark.long
@pytest.mark.timeout(3600)
@generated(*programs.OPERATORS, examples=5000, derandomize=False)
def test_fresh_programs(program, optimizer, memory):
    check(program, optimizer, memory)
