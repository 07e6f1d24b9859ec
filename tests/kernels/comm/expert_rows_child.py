"""Runs the kernels of `expert_rows` in the interpreter, as ranks of one process: ``python ..._child.py _ DONE.pt``.

A process of its own, because Triton chooses between interpreter and compiler when it is imported. Each rank's kernels
get a table of all ranks' memory; what one waits for, the others have told before.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepgraph.kernels.comm import expert_rows_triton as kernels
from stepgraph.kernels.comm.exchange import COME, FREE
from stepgraph.kernels.comm.expert_rows import places_reference
from stepgraph.kernels.moe import sort_by_expert
from tests.kernels.triton_tools import interpret_masks

interpret_masks()


class Memory:
    """That of ``ranks`` ranks and their flags, within reach of all."""

    def __init__(self, ranks, nbytes):
        self.ranks = range(ranks)
        self.parts = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in self.ranks]  # NaNs that nobody wrote
        self.flags = torch.zeros(ranks, 3, ranks, dtype=torch.int32)
        self.flags[:, FREE] = 1
        pointers = [[part.data_ptr() for part in self.parts], [flags.data_ptr() for flags in self.flags]]
        self.addresses = torch.tensor(pointers)

    def exchange(self, begin, end):
        """``begin(rank)`` on every rank, then ``end(rank)``: what all ``end`` give."""
        for rank in self.ranks:
            kernels.wait(self.addresses, rank, FREE)
            begin(rank)
            kernels.tell(self.addresses, rank, COME[0])
        found = []
        for rank in self.ranks:
            kernels.wait(self.addresses, rank, COME[0])
            found.append(end(rank))
            kernels.tell(self.addresses, rank, FREE)
        assert not self.flags[:, COME[0]].any() and self.flags[:, FREE].all()
        return found

    def at(self, rank, shape, dtype):
        return self.parts[rank].view(dtype)[: torch.Size(shape).numel()].view(shape)


def rows_of(memory, sent, there, back):
    """What ``sent[r]`` = (x, order, slots) of each rank is at the other side."""

    def begin(rank):
        kernels.send(*sent[rank], there[rank], len(back[rank]), memory.addresses)

    def end(rank):
        x = sent[rank][0]
        return kernels.take(memory.at(rank, (len(back[rank]), x.shape[1]), x.dtype), back[rank])

    return memory.exchange(begin, end)


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
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
    every = range(ranks)

    memory = Memory(ranks, 4 * max(ranks * experts, max(n, room) * D))
    everyone = memory.exchange(
        lambda rank: kernels.share(counts[rank], memory.addresses, rank),
        lambda rank: memory.at(rank, (ranks, experts), torch.int32).clone(),
    )
    assert all(torch.equal(found, torch.stack(counts)) for found in everyone)

    places = [kernels.places(everyone[r], torch.tensor(r, dtype=torch.int32), n, room) for r in every]
    for rank in every:
        expected = places_reference(everyone[rank], torch.tensor(rank), n, room)
        assert all(map(torch.equal, places[rank], expected)), (places[rank], expected)
    there, back, ends = zip(*places, strict=True)

    # Experts' rows are those of one rank with all tokens: by expert, rank and token. The rest, and no row, is zero.
    at_experts = rows_of(memory, [(x[r], order[r], slots) for r in every], there, back)
    whole, places_of_all, all_counts = sort_by_expert(chosen.flatten(0, 1), experts)
    taken = whole[whole >= 0] // slots
    by_rank = x.flatten(0, 1)[taken.long()].split(all_counts.view(ranks, here).sum(1).tolist())
    for rank in every:
        expected = torch.zeros(room, D, dtype=dtype)
        filled = by_rank[rank][:room]
        expected[: len(filled)] = filled
        assert torch.equal(at_experts[rank], expected)
        assert torch.equal(ends[rank].long(), all_counts.view(ranks, here)[rank].cumsum(0).clamp(max=room))

    # And back again, other values in the same memory: each slot has what stands at its row.
    results = [(rows * 2 + 1) for rows in at_experts]
    at_tokens = rows_of(memory, [(rows, None, 1) for rows in results], back, there)
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


check()
torch.save("done", sys.argv[2])
