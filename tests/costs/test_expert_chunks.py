"""How many parts a layer of experts takes its tokens in: by hand, and where there is little or much to hide."""

import pytest

from stepgraph.costs.expert_chunks import Layer, _overlapped, choose

LAYER = Layer(16384, 6, 2048, 1408, 32, 2, 2816, 2.0, 2, False, False)


def test_two_resources_by_hand():
    assert _overlapped(1, 2.0, 5.0, 2.0, 1.0) == 9.0  # nothing overlaps but the shared experts, which wait for none
    assert _overlapped(2, 1.0, 2.5, 1.0, 0.0) == 7.0  # the first part travels, both are computed, the last travels
    assert _overlapped(2, 3.0, 1.0, 3.0, 0.0) == 12.0  # the links are busy all the time
    assert _overlapped(2, 1.0, 2.5, 1.0, 9.0) == 15.0


@pytest.mark.parametrize(
    ("change", "chunks"),
    [
        ({}, 2),  # DeepSeek-V3 16B on two H200s, as it was measured
        ({"tokens": 64}, 1),  # launches take longer than what travels
        ({"tokens": 1}, 1),
        # DeepSeek-V3 671B over 8 machines, where tokens travel for most of the time.
        (dict(zip(LAYER._fields, (4096, 8, 7168, 2048, 4, 64, 2048, 1.0, 2, False, True), strict=True)), 4),
    ],
)
def test_choice(change, chunks):
    chosen = choose(LAYER._replace(**change))
    assert chosen.chunks == chunks and chosen.seconds[chunks] <= 1.02 * min(chosen.seconds.values()), chosen
    assert chosen.line().startswith(f"expert_chunks=auto: {chunks}; a layer of experts takes ")


def test_recomputation_leaves_more_to_hide_behind():
    """And fp8 takes less of both."""
    plain, again, fp8 = (choose(LAYER._replace(**c)).seconds for c in ({}, {"recomputed": True}, {"fp8": True}))
    assert all(fp8[c] < plain[c] < again[c] for c in plain)
