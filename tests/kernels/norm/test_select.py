"""The rules: what they take fits the hardware, whatever the shape."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.norm.triton.config.limits import REGISTERS, Hardware, Problem, shared_estimate
from stepgraph.kernels.norm.triton.config.select import select

H200 = Hardware(132, 228 * 1024 - 4096)
SIZES = st.sampled_from((2, 4))


@st.composite
def problems(draw):
    backward = draw(st.booleans())
    layer = draw(st.booleans())
    loads = tuple(draw(SIZES) for _ in range(draw(st.integers(1, 2)) + backward))
    sums = draw(st.integers(0, 1 + layer)) if backward else 0
    return Problem(
        backward, draw(st.integers(1, 1 << 20)), draw(st.integers(1, 262144)), 1, loads, (draw(SIZES),), layer,
        draw(st.integers(0, 2)), sums, draw(SIZES),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_problem_has_a_configuration_that_fits(problem):
    config = select(problem, H200)
    assert config.rows >= 1 and config.block * config.pieces(problem.N) * config.split >= problem.N
    assert config.rows & (config.rows - 1) == 0 and config.block & (config.block - 1) == 0
    assert config.warps * 32 <= 1024 and shared_estimate(problem, config) * max(1, config.programs) <= H200.shared
    assert config.threads * max(1, config.programs) * 32 <= REGISTERS
    if config.cooperative:
        assert config.programs and config.split <= H200.processors * config.programs


@settings(max_examples=50, deadline=None)
@given(problems(), st.integers(0, 3))
def test_nearby_numbers_of_rows_share_a_configuration(problem, more):
    """A cache of compiled kernels stays small: rows are told apart by their three leading bits."""
    shift = max(0, problem.M.bit_length() - 3)
    top = -(-problem.M >> shift) << shift
    assert select(problem._replace(M=max(1, top - more % (1 << shift))), H200) == select(problem._replace(M=top), H200)


def test_rows_too_long_for_all_processors_are_refused():
    problem = Problem(True, 64, 1 << 27, 1, (2, 2), (2,), False, 1, 1, 2)
    with pytest.raises(ValueError, match=r"rows of 134217728 .* split the last dimension"):
        select(problem, H200)


FORWARD = Problem(False, 8192, 65536, 1, (2,), (2,), False, 1, 0, 2)


def test_long_rows_stay_whole_while_they_fit_and_occupy_all_processors():
    assert select(FORWARD, H200).split == 1
    assert select(FORWARD._replace(N=131072), H200).split > 1
    assert select(FORWARD._replace(M=1), H200).split > 1
    assert select(FORWARD._replace(M=1, N=16384), H200).split == 1


def test_a_launch_ahead_finds_the_sums_of_a_few_long_rows():
    """Rows of 64 KiB: 16 are read again from the L2 cache, more are held."""
    few = FORWARD._replace(M=16, N=32768)
    assert select(few, H200).exchange == "launch" and not select(few, H200).cooperative
    assert select(few._replace(M=64), H200).split == 1
    assert select(few._replace(M=64, N=131072), H200).exchange == "wait"


@pytest.mark.parametrize(
    ("m", "n", "shift"), [(5013, 136, 1), (2602, 168, 1), (695, 816, 1), (948, 84, 8), (1301, 271, 8)]
)
def test_rows_of_brief_calls_lie_whole_in_a_tile(m, n, shift):
    """With few elements a thread, as all programs run at once."""
    config = select(FORWARD._replace(M=m, N=n, shift=shift), H200)
    assert config.pieces(n) == 1 and config.rows * config.block <= 8 * config.threads


@pytest.mark.parametrize(("n", "weight"), [(4096, "with"), (16384, "before"), (32768, "after"), (131072, "after")])
def test_the_weight_is_loaded_where_it_costs_least(n, weight):
    assert select(FORWARD._replace(N=n), H200).weight == weight


def test_short_calls_take_fewer_rows_a_program():
    long, short = (select(FORWARD._replace(M=m, N=256), H200) for m in (1 << 18, 4096))
    assert short.rows < long.rows
    assert short.rows < select(FORWARD._replace(M=8 * 4096, N=256), H200).rows


def test_rows_too_long_for_weights_per_head_say_so():
    problem = Problem(True, 4096, 32768, 8, (2, 2), (2,), False, 1, 1, 2)
    with pytest.raises(ValueError, match=r"a weight for each of 8 heads do not fit a program.*one weight for all"):
        select(problem, H200)
    assert select(problem._replace(N=12288), H200).split == 1
    assert select(problem._replace(heads=1), H200).split > 1
