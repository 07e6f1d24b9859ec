"""Calls of every operator on one device with inputs that lie in memory in other ways than contiguous."""

from collections.abc import Callable, Iterator

import torch

import stepgraph.kernels.embedding.gradient
import stepgraph.kernels.loss.counted
import stepgraph.kernels.loss.cross_entropy
import stepgraph.kernels.moe
import stepgraph.kernels.norm.column_sum  # noqa: F401  (each defines operators of torch.ops.stepgraph)
from stepgraph.kernels.norm import modulated, operators  # noqa: F401

ours = torch.ops.stepgraph
ROWS, WIDTH, VOCAB = 6, 33, 37


def padded(x):
    """Rows that lie apart, as Inductor lays out odd widths."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 7), 3.0 if x.is_floating_point() else 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def late(x):
    """Beginning within a storage, at no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def swapped(x):
    """The first two dimensions the other way around in memory; a matrix's columns are then contiguous."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def expanded(x):
    """One row for all: gradients of sums come so."""
    return x.flatten(0, -2)[:1].view(*(1,) * (x.ndim - 1), -1).expand(x.shape)


ANY = (padded, late, swapped, expanded)
WRITTEN = (padded, late, swapped)

Call = tuple[str, Callable, tuple]


def calls(device: str, dtype: torch.dtype) -> Iterator[Call]:
    """(name, operator, arguments): the arguments that must lie in rows in all layouts that leave rows contiguous, the
    others in all."""

    def data(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    logits, targets = data(ROWS, VOCAB), torch.randint(VOCAB, (ROWS,), device=device)
    one, column = torch.tensor(1.0, device=device), data(ROWS, dtype=torch.float32)
    for layout in WRITTEN:
        yield f"cross_entropy_ {layout.__name__}", ours.cross_entropy_, (layout(logits), targets, one, True, -100)
        tokens = (layout(logits), targets, column, column.abs(), *[column] * 4, 0.7, -100)
        yield f"token_gradient_ {layout.__name__}", ours.token_gradient_, tokens
        tokens = (layout(logits), layout(logits.flip(0)), column, column, column, column.abs(), 0.7, False)
        yield f"token_kl_gradient_ {layout.__name__}", ours.token_kl_gradient_, tokens
    spread = torch.stack([targets, targets], 1)[:, 1]
    yield "cross_entropy_, targets apart", ours.cross_entropy_, (logits.clone(), spread, one, False, -100)
    end = torch.tensor(ROWS, dtype=torch.int32, device=device)
    hidden, head, slopes = data(ROWS, 48), data(VOCAB, 48), torch.nn.functional.pad(logits, (0, 256 - VOCAB))
    for layout in WRITTEN if dtype != torch.float32 or device == "cpu" else ():
        rows = layout(hidden), layout(head).t()
        yield f"counted_logits {layout.__name__}", ours.counted_logits, (*rows, layout(data(1, VOCAB))[0], end, 0)
        yield f"counted_dx {layout.__name__}", ours.counted_dx, (layout(slopes), layout(head), end, 0)
        yield f"counted_dw_ {layout.__name__}", ours.counted_dw_, (layout(head), layout(slopes), rows[0], end, 0, True)
        yield f"counted_db {layout.__name__}", ours.counted_db, (layout(slopes), end, 0)
    norm = (dtype, "layer", 1e-5, 0.0)
    x, weight, r = data(2, ROWS, WIDTH), data(WIDTH), data(2, ROWS, WIDTH)
    for layout in ANY:
        name = layout.__name__
        yield f"token_stats {name}", ours.token_stats, (layout(logits), targets, 0.7, -100)
        yield f"token_kl_stats {name}", ours.token_kl_stats, (layout(logits), layout(logits.flip(0)), 0.7)
        yield f"column_sum {name}", ours.column_sum, (layout(data(ROWS, WIDTH, dtype=torch.float32)), dtype)
        grad, indices = layout(x), torch.randint(VOCAB, (ROWS, 2), device=device).t()
        yield f"embedding_backward {name}", ours.embedding_backward, (grad, indices, VOCAB, -1)
        yield f"norm {name}", ours.norm, (layout(x), weight, weight, layout(r), *norm, True)
        h, mean = data(2, ROWS, WIDTH), data(2, ROWS, 2, dtype=torch.float32)[..., 0]
        saved = (layout(h), weight, mean, mean.abs() + 1, layout(r))
        yield f"norm_backward {name}", ours.norm_backward, (layout(x), *saved, *norm, dtype, True, True, True)
        mean, scale = data(2, ROWS, 1, dtype=torch.float32), layout(data(2, 1, WIDTH))
        of_norm = (layout(data(2, ROWS, WIDTH)), layout(x), mean, mean.abs() + 1, scale, 1.0, layout(r))
        yield f"modulated_norm_backward {name}", ours.modulated_norm_backward, of_norm
        gated = *of_norm, layout(h), layout(data(2, 1, WIDTH))
        yield f"gated_norm_backward {name}", ours.gated_norm_backward, gated
        yield from expert_calls(layout, data)
    # A gradient may come with any last stride.
    columns = x.transpose(1, 2).contiguous().transpose(1, 2)
    saved = (x, weight, data(2, ROWS, dtype=torch.float32), data(2, ROWS, dtype=torch.float32).abs(), columns)
    yield "norm_backward, columns", ours.norm_backward, (columns, *saved, *norm, dtype, True, True, True)
    yield "embedding_backward, columns", ours.embedding_backward, (columns, indices, VOCAB, -1)


def expert_calls(layout: Callable, data: Callable) -> Iterator[Call]:
    """What a mixture of experts computes: 6 tokens of 2 slots, one of them unused, 3 experts, a row past the end."""
    x, rows, dy, weights = data(6, 40), data(13, 40), data(13, 16), data(6, 2, dtype=torch.float32)
    chosen = torch.tensor([[0, 2], [2, 1], [0, 5], [1, 0], [2, 0], [2, 1]], device=x.device)
    order, places, counts = ours.sort_by_expert(chosen, 3)
    order, offsets = torch.cat([order, order[-1:]]), counts.cumsum(0, dtype=torch.int32)
    weight, name = data(3, 40, 16), layout.__name__
    yield f"sort_by_expert {name}", ours.sort_by_expert, (layout(chosen), 3)
    yield f"gather_rows {name}", ours.gather_rows, (layout(x), places, order, 13)
    yield f"combine_rows {name}", ours.combine_rows, (layout(rows), places, layout(weights), order)
    arguments = layout(x), layout(rows), places, layout(weights), order
    yield f"combine_rows_backward {name}", ours.combine_rows_backward, arguments
    yield f"grouped_mm {name}", ours.grouped_mm, (layout(rows), layout(weight), offsets)
    yield f"grouped_mm, transposed {name}", ours.grouped_mm, (rows, layout(weight.mT.contiguous()).mT, offsets)
    gate_up = layout(data(13, 40))
    yield f"swiglu_rows {name}", ours.swiglu_rows, (gate_up, offsets)
    yield f"swiglu_rows_backward {name}", ours.swiglu_rows_backward, (layout(data(13, 20)), gate_up, offsets)
    yield f"grouped_mm_weight {name}", ours.grouped_mm_weight, (layout(rows), layout(dy), offsets)
    if x.device.type == "cpu":  # on a GPU: widths of multiples of 16, anything past the last end and scale
        pair = layout(data(13, 96)), offsets
        yield f"swiglu_rows_cast {name}", ours.swiglu_rows_cast, (*pair, True)
        yield f"swiglu_rows_cast_backward {name}", ours.swiglu_rows_cast_backward, (layout(data(13, 48)), *pair, True)
        e4m3, rows, dy = torch.float8_e4m3fn, data(13, 48), data(13, 16)
        yield f"cast_packed_rows {name}", ours.cast_packed_rows, (layout(rows),)
        yield f"cast_scaled_groups {name}", ours.cast_scaled_groups, (layout(rows), offsets, e4m3)
        (a, scale_a, ends), (b, scale_b, _) = (ours.cast_scaled_groups(t, offsets, e4m3) for t in (rows, dy))
        yield f"grouped_scaled_mm_weight {name}", ours.grouped_scaled_mm_weight, (a, b, scale_a, scale_b, ends)
        w, weight_scale, _, _ = ours.cast_scaled_rows(data(48, 48), e4m3, True, False)
        packed = ours.cast_packed_rows(layout(rows))
        arguments = packed, w.view(3, 16, 48), weight_scale.view(3, 16), offsets
        yield f"grouped_scaled_mm {name}", ours.grouped_scaled_mm, arguments


def check_call(name: str, operator: Callable, arguments: tuple) -> None:
    """The fake gives what the real one gives, and the layout of the inputs changes no value."""

    def dense(value):
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    def clone(value):
        return value.clone(memory_format=torch.preserve_format) if isinstance(value, torch.Tensor) else value

    def as_list(result):
        return [result] if isinstance(result, torch.Tensor) else list(result or ())

    def same_memory(value):  # `clone` would make an expanded or a padded tensor dense
        if not isinstance(value, torch.Tensor):
            return value
        size = value.untyped_storage().size() // value.element_size()
        whole = value.as_strided((size,), (1,), 0).clone()
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    given = tuple(map(same_memory, arguments))
    mode = torch._subclasses.FakeTensorMode()
    fakes = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given)
    with mode:
        expected = as_list(operator(*fakes))
    straight = tuple(clone(dense(a)) for a in arguments)
    results, plain = as_list(operator(*given)), as_list(operator(*straight))
    assert len(results) == len(expected) == len(plain), name
    for i, (real, fake, other) in enumerate(zip(results, expected, plain, strict=True)):
        if real is None or fake is None:
            assert real is fake is other is None, f"{name}, output {i}"
            continue
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype), f"{name}, output {i}"
        compare(real, other, f"{name}, output {i}")
    for i, (mine, other) in enumerate(zip(given, straight, strict=True)):
        if isinstance(mine, torch.Tensor):
            compare(mine, other, f"{name}, argument {i} afterwards")


def compare(given: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    # Sums over rows that lie otherwise may be taken in another order, and exp of them has another last bit: so may the
    # lowest bit of a byte in fp8, or of a scale's lowest byte.
    rtol = max(4 * torch.finfo(given.dtype).eps, 1e-5) if given.is_floating_point() else 0
    atol = 1 if given.dtype == torch.uint8 else rtol
    given, expected = (t.double() for t in (given, expected))
    torch.testing.assert_close(given, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}")
