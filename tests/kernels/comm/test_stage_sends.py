"""Messages of a pipeline over symmetric memory, with all ranks in one process: a step's messages arrive in any order in
which ranks may run, no send waits, and the step leaves all flags as it found them."""

import contextlib
import random
from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepgraph import compat
from stepgraph.kernels.comm import exchange, stage_sends
from stepgraph.kernels.comm.stage_sends import sent
from stepgraph.parallel.pipeline.messages import calls_of, message_of, places_of
from stepgraph.parallel.pipeline.schedules import SCHEDULES, check_schedule, rank_of, work_of

NAME, CPU = "a group", torch.device("cpu")
SIZES = {True: 24, False: 40}  # elements of a message, forward and backward
NBYTES = 160


class Memory:
    """Symmetric memory as a rank has it: that of all ranks and their flags. What waits for a flag must find it."""

    signal_pad_size = 2048

    def __init__(self, rank, parts, pads):
        self.rank, self.parts, self.pads = rank, parts, pads

    def get_buffer(self, rank, shape, dtype, start):
        return self.parts[rank].view(dtype)[start : start + torch.Size(shape).numel()].view(shape)

    def get_signal_pad(self, rank, shape, dtype, start):
        return self.pads[rank, start : start + torch.Size(shape).numel()]

    def _flag(self, holder, teller, channel):
        return self.get_signal_pad(holder, (1,), torch.int32, channel * len(self.parts) + teller)

    def wait_signal(self, rank, channel):
        flag = self._flag(self.rank, rank, channel)
        assert flag == 1, f"rank {self.rank} waits for rank {rank}"
        flag.zero_()

    def put_signal(self, rank, channel):
        flag = self._flag(rank, self.rank, channel)
        assert flag == 0
        flag.fill_(1)


class World:
    """All ranks of a pipeline, each with its session, and the messages that its schedule sends in a step."""

    def __init__(self, name, ranks, microbatches, fewer=0):
        schedule = SCHEDULES[name]
        where = [rank_of(schedule, ranks, stage) for stage in range(ranks * schedule.chunks)]
        orders = work_of(name, ranks, microbatches)
        calls = calls_of(orders, where, symmetric=True)
        self.ranks = range(ranks)
        self.messages = [[m for call in own if (m := message_of(call, where))] for own in calls]
        self.boxes, room = {}, Counter()
        for channel, places in places_of(calls, where).items():
            self.boxes[channel] = [room[channel.receiver], places - fewer]
            room[channel.receiver] += places
        self.room = max(room.values())
        self.boxes = {channel: [*box, self.room, NBYTES] for channel, box in self.boxes.items()}
        self.sessions = [exchange.Session() for _ in self.ranks]
        self.parts = [torch.full((self.room * NBYTES,), 255, dtype=torch.uint8) for _ in self.ranks]
        self.pads = torch.zeros(ranks, 512, dtype=torch.int32)

    @contextlib.contextmanager
    def on(self, rank):
        """What is inside runs on ``rank``."""
        group = mock.Mock(group_name=NAME)
        group.rank.return_value, group.size.return_value = rank, len(self.ranks)
        memory = None, Memory(rank, self.parts, self.pads)
        with (
            mock.patch.object(compat, "process_group", return_value=group),
            mock.patch.object(compat, "symmetric_memory", return_value=memory),
            self.sessions[rank],
        ):
            yield

    def step(self, seed, rank_to_run):
        """One step of all ranks. ``rank_to_run``: of those whose next message can go, or is there, the one that goes
        on."""
        for rank in self.ranks:
            with self.on(rank):
                stage_sends.open_boxes(self.sessions[rank], NAME, self.room, NBYTES, CPU)
        flags, at, sent_, taken = self.pads.clone(), Counter(), Counter(), Counter()
        while True:
            able = [
                rank
                for rank in self.ranks
                if at[rank] < len(self.messages[rank])
                and (
                    (m := self.messages[rank][at[rank]]).sends or sent_[m.channel] > taken[m.channel]
                )
            ]  # fmt: skip
            if not able:
                break
            rank = rank_to_run(able)
            channel, sends, _ = self.messages[rank][at[rank]]
            at[rank] += 1
            count = sent_ if sends else taken
            value = content(seed, channel, count[channel])
            count[channel] += 1
            with self.on(rank):
                if sends:
                    stage_sends._send(value, channel.receiver, self.boxes[channel], NAME)
                else:
                    form = (value.shape, value.stride(), value.dtype, CPU)
                    found = stage_sends._recv(*form, channel.sender, self.boxes[channel], NAME)
                    assert torch.equal(found, value) and found.stride() == value.stride()
        assert [at[rank] for rank in self.ranks] == list(map(len, self.messages))
        assert torch.equal(self.pads, flags)
        for session in self.sessions:
            sent(session)
            assert session.mail[NAME].kept is None


def content(seed, channel, number):
    """The message ``number`` of a channel, transposed."""
    generator = torch.Generator().manual_seed(hash((seed, *channel, number)) % 2**31)
    return torch.randn(2, SIZES[channel.forward] // 2, generator=generator).t()


@pytest.fixture(autouse=True)
def as_on_gpus():
    with (
        mock.patch.object(stage_sends, "_writes", return_value=True),
        mock.patch.multiple(torch.cuda, Stream=mock.DEFAULT, stream=mock.MagicMock(), current_stream=mock.DEFAULT),
    ):
        yield


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(0, 4), st.integers(0, 99))
def test_messages_arrive_and_no_send_waits(name, ranks, more, seed):
    microbatches = ranks * SCHEDULES[name].fewest + more
    with contextlib.suppress(ValueError):
        check_schedule(name, ranks, microbatches)
        world, chosen = World(name, ranks, microbatches), random.Random(seed)
        ahead = chosen.randrange(ranks)  # often one rank runs as far as it can
        for step in range(2):
            world.step(step, lambda able: ahead if ahead in able and chosen.random() < 0.8 else chosen.choice(able))


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_a_place_less_a_send_waits(name):
    world = World(name, 3, 6, fewer=1)
    with pytest.raises(AssertionError, match=r"^rank \d waits for rank \d"):
        for ahead in range(3):
            world.step(0, lambda able, ahead=ahead: ahead if ahead in able else able[0])


@pytest.mark.parametrize(("name", "most"), [("1f1b", 8), ("zero-bubble", 8), ("interleaved", 15), ("dualpipev", 15)])
def test_places_do_not_grow_with_microbatches(name, most):
    """Eight ranks, as many as a machine has GPUs, have flags enough."""
    for microbatches in (16, 64):
        world = World(name, 8, microbatches)
        assert max(places for _, places, *_ in world.boxes.values()) == most
        with world.on(0):
            stage_sends.open_boxes(world.sessions[0], NAME, world.room, NBYTES, CPU)
            with pytest.raises(
                ValueError, match=r"^stage_sends=symmetric: .* need 31 places and there are flags for 30:"
            ):
                stage_sends.open_boxes(world.sessions[0], NAME, 31, NBYTES, CPU)


def test_after_a_step_that_was_broken_off_memory_is_new():
    world = World("1f1b", 2, 4)
    with world.on(0):
        stage_sends.open_boxes(world.sessions[0], NAME, world.room, NBYTES, CPU)
        (channel,) = [c for c in world.boxes if c.sender == 0]
        stage_sends._send(content(0, channel, 0), 1, world.boxes[channel], NAME)
    old, age = world.sessions[0].mail[NAME], world.sessions[0].age({NAME})
    world.sessions[0].forget({NAME})
    assert not world.sessions[0].mail and old in world.sessions[0].broken and old.kept is not None
    assert world.sessions[0].age({NAME}) == age + 1
    world.pads.zero_()  # those of memory that was just allocated
    world.step(1, lambda able: able[0])
    assert world.sessions[0].mail[NAME].workspace is not old.workspace
