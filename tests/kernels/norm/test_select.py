"""The rules: what they take fits the hardware, whatever the shape; and tuning keeps the fastest, on disk too."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.norm.triton.config import tuning
from stepgraph.kernels.norm.triton.config.limits import REGISTERS, Hardware, Problem, fits, shared_estimate
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


PROBLEM = Problem(True, 4096, 2048, 1, (2, 2), (2,), False, 1, 1, 2)


def test_neighbours_fit_and_start_with_the_rules():
    found = tuning.neighbours(PROBLEM, H200)
    assert found[0] == select(PROBLEM, H200)
    assert len(found) > 5 and len(set(found)) == len(found)
    assert all(fits(PROBLEM, config, H200) for config in found)


def test_the_fastest_is_kept_on_disk(tmp_path, monkeypatch):
    """With a clock of its own that prefers one neighbour; the second process does not time at all."""
    best = tuning.neighbours(PROBLEM, H200)[3]
    timed = []

    def clock(run, config):
        timed.append(config)
        run(config)
        return 1.0 if config == best else 2.0

    file = tmp_path / "norms.json"
    monkeypatch.setattr(tuning, "_file", lambda: file)
    monkeypatch.setattr(tuning, "_milliseconds", clock)
    monkeypatch.setattr(tuning, "_found", {})
    monkeypatch.setattr(tuning.torch.cuda, "is_current_stream_capturing", lambda: False)
    ran = []
    assert tuning.choose(PROBLEM, H200, ran.append) == select(PROBLEM, H200) and not timed
    with tuning.autotune():
        assert tuning.choose(PROBLEM, H200, ran.append) == best
        assert ran == timed == tuning.neighbours(PROBLEM, H200)
        tuning._found.clear()
        assert tuning.choose(PROBLEM, H200, ran.append) == best
        other = PROBLEM._replace(N=1024)
        assert tuning.choose(other, H200, ran.append) in tuning.neighbours(other, H200)
    assert len(json.loads(file.read_text())) == 2
    assert tuning.choose(PROBLEM, H200, ran.append) == select(PROBLEM, H200)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": {"rows": 1}}'])
def test_a_damaged_file_is_named(text, tmp_path, monkeypatch):
    file = tmp_path / "norms.json"
    file.write_text(text)
    monkeypatch.setattr(tuning, "_file", lambda: file)
    monkeypatch.setattr(tuning, "_found", {})
    with tuning.autotune(), pytest.raises(ValueError, match=r"norms\.json .* delete the file"):
        tuning.choose(PROBLEM, H200, print)


def test_without_a_cache_results_last_as_long_as_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPGRAPH_CACHE", "off")
    monkeypatch.setattr(tuning, "_found", {})
    tuned = []
    monkeypatch.setattr(tuning, "fastest", lambda configs, run: tuned.append(run) or configs[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with tuning.autotune():
        first, second = (tuning.choose(PROBLEM, H200, print) for _ in range(2))
    assert first == second == tuning.neighbours(PROBLEM, H200)[-1] and len(tuned) == 1
    assert not list(tmp_path.iterdir())


def test_turning_tuning_on_and_off_forgets_plans(monkeypatch):
    calls = []
    monkeypatch.setattr(tuning, "_on_change", [lambda: calls.append(tuning._enabled)])
    with tuning.autotune():
        pass
    assert calls == [True, False]


def test_sums_in_the_kernel_for_long_calls_only():
    """A cooperative launch costs 2 microseconds: see `select`."""
    assert select(PROBLEM, H200).finish == "launch"
    assert select(PROBLEM._replace(M=1 << 20), H200).finish == "grid"


FORWARD = Problem(False, 8192, 65536, 1, (2,), (2,), False, 1, 0, 2)


def test_long_rows_stay_whole_while_they_fit_and_occupy_all_processors():
    assert select(FORWARD, H200).split == 1
    assert select(FORWARD._replace(N=131072), H200).split > 1
    assert select(FORWARD._replace(M=1), H200).split > 1
    assert select(FORWARD._replace(M=1, N=16384), H200).split == 1


def test_a_launch_ahead_finds_the_sums_of_a_few_long_rows():
    """Rows of 64 KiB: 16 are read again from the L2 cache, more are held. What is quantized exchanges twice."""
    few = FORWARD._replace(M=16, N=32768)
    assert select(few, H200).exchange == "launch" and not select(few, H200).cooperative
    assert select(few._replace(M=64), H200).split == 1
    assert select(few._replace(quantized=True), H200).exchange == "wait"
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
    assert select(FORWARD._replace(N=n, quantized=True), H200).weight == "before"


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
