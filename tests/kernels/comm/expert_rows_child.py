"""Runs the operators of `expert_rows` as on GPUs, in Triton's interpreter: ``python ..._child.py _ DONE.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported. It is all ranks, one
after the other: each has its session, and a table of all ranks' memory; what one waits for, others have told before.
"""

import contextlib
import os
import sys
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepgraph import compat
from stepgraph.kernels.comm import exchange, expert_rows
from stepgraph.kernels.moe import sort_by_expert
from tests.kernels.triton_tools import interpret_masks

interpret_masks()
NAME = "a group"


class Memory:
    """Symmetric memory, as torch's handle gives it: that of all ranks and their flags."""

    def __init__(self, ranks, nbytes):
        self.parts = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(ranks)]  # NaNs that nobody wrote
        self.pads = torch.zeros(ranks, 4 * ranks, dtype=torch.int32)

    def get_buffer(self, rank, shape, dtype, start):
        return self.parts[rank].view(dtype)[start : start + torch.Size(shape).numel()].view(shape)

    def get_signal_pad(self, rank, shape, dtype, start):
        return self.pads[rank, start : start + 1]


class World:
    """``ranks`` ranks of one group, each with a session."""

    def __init__(self, ranks):
        self.sessions = [exchange.Session() for _ in range(ranks)]
        self.made, self.taken = [], [0] * ranks
        self.rank = 0

    @property
    def memory(self):
        return self.made[-1]

    @contextlib.contextmanager
    def on(self, rank):
        """What is inside runs on ``rank``."""
        self.rank = rank
        group = mock.Mock(group_name=NAME)
        group.rank.return_value, group.size.return_value = rank, len(self.sessions)
        with mock.patch.object(compat, "process_group", return_value=group), self.sessions[rank]:
            yield

    def allocate(self, nbytes, name, device):
        """In place of `compat.symmetric_memory`: the ranks allocate in one order."""
        number = self.taken[self.rank]
        self.taken[self.rank] += 1
        if number == len(self.made):
            self.made.append(Memory(len(self.sessions), nbytes))
        return None, self.made[number]

    def exchange(self, begin, end):
        """``begin(rank)`` on every rank, then ``end(rank)``: what all ``end`` give. Flags are then as before."""
        found = []
        for call in (begin, end):
            for rank in range(len(self.sessions)):
                with self.on(rank):
                    found.append(call(rank))
        for memory in self.made:
            flags = memory.pads.view(len(self.sessions), 4, -1)
            assert not flags[:, exchange.COME[0]].any() and flags[:, exchange.FREE].all()
        return found[len(self.sessions) :]


def rows_of(world, sent, there, back, *zero_rest):
    """What ``sent[r]`` = (x, order, slots) of each rank is at the other side."""
    where = len(there), NAME

    def begin(rank):
        return expert_rows._rows_begin(*sent[rank], there[rank], back[rank], *where)

    def end(rank):
        return expert_rows._rows_end(torch.empty(1), sent[rank][0], back[rank], *where, *zero_rest)

    return world.exchange(begin, end)


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    ranks=st.integers(2, 3), here=st.integers(1, 3), tokens=st.integers(1, 6), slots=st.integers(1, 2),
    D=st.sampled_from([1, 3, 16, 33]), room=st.sampled_from([0.5, 1, 3]), seed=st.integers(0, 99),
    routing=st.sampled_from(["any", "one expert", "some unused"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def check(ranks, here, tokens, slots, D, room, seed, routing, dtype):
    generator = torch.Generator().manual_seed(seed)
    experts, n = ranks * here, tokens * slots
    room = int(room * n) + 1
    chosen = torch.randint(-(routing == "some unused"), experts, (ranks, tokens, slots), generator=generator)
    if routing == "one expert":
        chosen[:] = seed % experts
    x = torch.randn(ranks, tokens, D, generator=generator).to(dtype)
    order, _, counts = zip(*(sort_by_expert(c, experts) for c in chosen), strict=True)

    world = World(ranks)
    with mock.patch.object(compat, "symmetric_memory", world.allocate):
        check_in(world, ranks, here, n, slots, D, room, chosen, x, order, counts)


def check_in(world, ranks, here, n, slots, D, room, chosen, x, order, counts):
    experts, every, dtype = ranks * here, range(ranks), x.dtype
    everyone = world.exchange(
        lambda rank: expert_rows._counts_begin(counts[rank], ranks, NAME),
        lambda rank: expert_rows._counts_end(torch.empty(1), counts[rank], ranks, NAME),
    )
    for rank, (found, place) in enumerate(everyone):
        assert torch.equal(found, torch.stack(counts)) and place == rank

    places = [expert_rows._expert_places(*everyone[rank], n, room) for rank in every]
    for rank in every:
        expected = expert_rows.places_reference(*everyone[rank], n, room)
        assert all(map(torch.equal, places[rank], expected)), (places[rank], expected)
    there, back, ends = zip(*places, strict=True)

    # Experts' rows are those of one rank with all tokens: by expert, rank and token. The rest, and no row, is zero.
    at_experts = rows_of(world, [(x[r], order[r], slots) for r in every], there, back)
    whole, places_of_all, all_counts = sort_by_expert(chosen.flatten(0, 1), experts)
    taken = whole[whole >= 0] // slots
    by_rank = x.flatten(0, 1)[taken.long()].split(all_counts.view(ranks, here).sum(1).tolist())
    for rank in every:
        expected = torch.zeros(room, D, dtype=dtype)
        filled = by_rank[rank][:room]
        expected[: len(filled)] = filled
        assert torch.equal(at_experts[rank], expected)
        assert torch.equal(ends[rank].long(), all_counts.view(ranks, here)[rank].cumsum(0).clamp(max=room))

    # The same without the zeros.
    for rank, rows in enumerate(rows_of(world, [(x[r], order[r], slots) for r in every], there, back, False)):
        assert torch.equal(rows[back[rank] >= 0], at_experts[rank][back[rank] >= 0])

    # And back again, other values in the same memory: each slot has what stands at its row.
    results = [(rows * 2 + 1) for rows in at_experts]
    at_tokens = rows_of(world, [(rows, None, 1) for rows in results], back, there)
    stored = torch.cat([torch.cat([by * 2 + 1, by.new_zeros(1, D)]) for by in by_rank])  # a zero behind each rank's
    begins = all_counts.view(ranks, here).sum(1).cumsum(0) - all_counts.view(ranks, here).sum(1)
    for rank in every:
        expected = torch.zeros(n, D, dtype=dtype)
        for row, slot in enumerate(order[rank].tolist()):
            if slot < 0:
                continue
            expert = int(chosen[rank].flatten()[slot])
            owner = expert // here
            stands = int(places_of_all.view(ranks, n)[rank, slot]) - int(begins[owner])
            if stands < room:
                expected[row] = stored[int(begins[owner]) + owner + stands]
        assert torch.equal(at_tokens[rank], expected)


with (
    mock.patch.object(expert_rows, "_writes", return_value=True),
    mock.patch.multiple(torch.cuda, Stream=mock.DEFAULT, stream=mock.MagicMock(), current_stream=mock.DEFAULT),
):
    check()
torch.save("done", sys.argv[2])
