"""Rows shared by several programs: each holds some of the columns, and they exchange their sums over the row.

A row of more than about 16,384 elements does not fit the registers of one program. Instead of reading it twice,
``SPLIT`` programs, which run at the same time on different processors (a cooperative launch), hold one slice each for
the whole pass over memory, publish their share of a sum over the row, and wait for the others'. Loads of the next rows
are in flight during this wait.

A share is one 64-bit word, its float32 value in the lower half and the number of its step in the upper, written and
read whole: no fence, and no separate flag to read. Words for four steps suffice even if a tile is finished a step late:
a program that publishes step i + 4 has collected step i + 2, so all have published that, and so collected step i. The
words are zero before and after: the last program of a group to leave clears them. Shares are added in the order of
their columns, so results are bitwise reproducible.

Few rows, which the L2 cache holds, take less time by two launches than by one cooperative launch, which begins two
microseconds later: the first (`forward.sums_kernel`) publishes the sums of all slices, the second reads the rows again.
With ``EXCHANGE`` "depend" the second begins, and reads its rows, while the first still runs, and waits for its end
before it collects (programmatic dependent launch); with "collect" it begins after it.

Every other launch that is not cooperative may begin before the one ahead of it ends, too, and waits for that end before
it touches memory (`begin`): 0.2 microseconds less forward, and 0.5 backward, which makes two launches.

Triton's interpreter runs programs one after another and would wait for ever. There a kernel is launched twice, with
``EXCHANGE`` "publish", then "collect", and one word per step.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Wait for the previous launch to end, if this one may begin before that."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def end(DEPENDENT: tl.constexpr):
    """Let the next launch begin; it waits in the same way."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def words_of_group(steps, P, KINDS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, EXCHANGE: tl.constexpr):
    """How many words a group has."""
    turns = 4 if EXCHANGE == "wait" else tl.cdiv(steps, P) + 1
    return turns * (KINDS * SPLIT * ROWS)


@triton.jit
def share_slot(words, step, which: tl.constexpr, KINDS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
               EXCHANGE: tl.constexpr):  # fmt: skip
    """Words of one kind of share in one step of this program's group: (SPLIT, ROWS)."""
    turn = step % 4 if EXCHANGE == "wait" else step
    return words + (turn * KINDS + which) * (SPLIT * ROWS)


@triton.jit
def publish(value, slot, part, step, ROWS: tl.constexpr, EXCHANGE: tl.constexpr):
    """Publish ``value`` (ROWS,) of this part to the group."""
    if EXCHANGE == "wait" or EXCHANGE == "publish":
        low = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        word = ((step + 1).to(tl.int64) << 32) | low
        tl.atomic_xchg(slot + part * ROWS + tl.arange(0, ROWS), word, sem="relaxed", scope="gpu")


@triton.jit
def collect(words, step, KINDS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, EXCHANGE: tl.constexpr):
    """Shares of all parts in a step, once they have arrived: of the first and of the last kind, (SPLIT rounded up to a
    power of two, ROWS) each.

    Zero for the parts that only round SPLIT up. Those of step -1 are there from the start.
    """
    turn = step + 4 if EXCHANGE == "wait" else tl.maximum(step, 0)
    WIDTH: tl.constexpr = triton.next_power_of_2(SPLIT)
    part = tl.arange(0, WIDTH)[:, None]
    place = (part % SPLIT) * ROWS + tl.arange(0, ROWS)[None, :]
    first = share_slot(words, turn, 0, KINDS, SPLIT, ROWS, EXCHANGE) + place
    last = share_slot(words, turn, KINDS - 1, KINDS, SPLIT, ROWS, EXCHANGE) + place
    if EXCHANGE == "wait":
        # A loop written in Triton here would keep the compiler from pipelining the loop around it. Both kinds are read
        # in each turn of this one, so that they take the time of one.
        a, b = tl.inline_asm_elementwise(
            """{
            .reg .pred early;
            .reg .b32 tag, other;
            POLL:
            ld.relaxed.gpu.global.v2.b32 {$0, tag}, [$2];
            ld.relaxed.gpu.global.v2.b32 {$1, other}, [$3];
            setp.ne.b32 early, tag, $4;
            setp.ne.or.b32 early, other, $4, early;
            @early bra POLL;
            }"""
            if KINDS == 2
            else """{
            .reg .pred early;
            .reg .b32 tag;
            POLL:
            ld.relaxed.gpu.global.v2.b32 {$0, tag}, [$2];
            setp.ne.b32 early, tag, $4;
            @early bra POLL;
            mov.b32 $1, $0;
            }""",
            "=&r,=&r,l,l,r",
            [first.to(tl.int64), last.to(tl.int64), tl.zeros((WIDTH, ROWS), tl.int32) + (step + 1).to(tl.int32)],
            dtype=(tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        if EXCHANGE == "depend":
            gdc_wait()
        a = tl.load(first, volatile=True).to(tl.int32).to(tl.float32, bitcast=True)
        b = tl.load(last, volatile=True).to(tl.int32).to(tl.float32, bitcast=True) if KINDS == 2 else a
    return tl.where(part < SPLIT, a, 0.0), tl.where(part < SPLIT, b, 0.0)


@triton.jit
def leave(words, leavers, KINDS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, EXCHANGE: tl.constexpr):
    """The last program of a group to arrive resets the group's words and counter to zero."""
    if EXCHANGE == "wait":
        tl.debug_barrier()
        if tl.atomic_add(leavers, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            SIZE: tl.constexpr = 4 * KINDS * SPLIT * ROWS
            at = tl.arange(0, triton.next_power_of_2(SIZE))
            tl.store(words + at, tl.zeros_like(at).to(tl.int64), mask=at < SIZE)
            tl.store(leavers, 0)
