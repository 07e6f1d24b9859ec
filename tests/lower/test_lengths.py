"""Captures from one trace with open sizes: each is what a trace of its own gives, or the step is traced."""

import contextlib
import copy
import logging
import math
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture.batch import first_places, form, shared_memory
from stepgraph.capture.optimizer import Update
from stepgraph.kernels.comm.exchange import Session
from stepgraph.lower import Lengths, StepSpec, lengths, trace
from stepgraph.passes import StepOptions
from stepgraph.run.bound import BoundStep
from stepgraph.run.memory import Memory

HIDDEN, VOCAB = 16, 24
#: Here the third one is traced with open sizes too, the fourth compared; from the fifth on none is traced.
LENGTHS = (9, 14, 11, 8, 5, 20, HIDDEN, VOCAB, 2, 31, 3)


@pytest.fixture(autouse=True)
def _sooner(monkeypatch):
    monkeypatch.setattr(lengths, "_MADE_FOR", 3)


class Model(nn.Module):
    """An embedding, ``mix(hidden, ids)``, and logits."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.gates = nn.ParameterList([torch.ones(HIDDEN), 2 * torch.ones(HIDDEN)])
        self.mix = mix
        self.threshold = 12

    def forward(self, ids):
        return self.head(self.mix(self, self.embedding(ids), ids))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def batch_of(rows, length):
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"ids": ids, "labels": ids.clone()}


def text(traced):
    """Its graphs, without the lines of this file."""
    return re.sub(r"test_lengths\.py:\d+", "", traced.program.text())


class Forms:
    """The forms of one step, as `stepgraph.capture` asks for them."""

    def __init__(self, model, loss=loss_fn, accumulate=1, optimizer=True):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer else None
        self.spec = StepSpec(model, loss, None, sgd, accumulate=accumulate, max_grad_norm=1.0, passes="exact")
        self.update = Update(sgd) if sgd else None
        self.lengths, self.made = Lengths(), []

    def __call__(self, batch):
        """Whether the form of ``batch`` was not traced; it is what a trace gives."""
        spec = replace(self.spec, batch=batch)
        leaves = list(batch.values())
        signature = type(batch), *map(form, leaves), *first_places(leaves), *shared_memory(leaves)
        got = self.lengths.traced(spec, (signature,))
        bound = BoundStep(got, self.update, Session(), Memory())
        self.lengths.keep(bound)
        self.made.append(bound)
        fresh = trace(spec)
        assert text(got) == text(fresh)
        lengths._check_same(fresh.program, got.program)
        assert [s.what for s in got.step.inputs] == [s.what for s in fresh.step.inputs]
        assert got.program.schedule == fresh.program.schedule
        return self.lengths.note == lengths.NOT_TRACED


def attend(model, x, ids):
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def own_mask(model, x, ids):
    n = ids.shape[1]
    scores = x @ x.transpose(1, 2)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -1e9).softmax(-1) @ x


def window(model, x, ids):
    places = torch.arange(x.shape[1])
    near = (places[:, None] - places[None, :]).abs() <= 3
    return (x @ x.mT + torch.where(near, 0.0, -1e9)).softmax(-1) @ x


def positions(model, x, ids):
    n = x.size(1)
    return x + torch.arange(n, dtype=torch.float32)[None, :, None] / n


def means(model, x, ids):
    return x * x.mean() + x.sum(1, keepdim=True) / ids.shape[1] + x / x.numel()


def padded(model, x, ids):
    return F.pad(x, (0, 0, 0, x.shape[1]))[:, : x.shape[1]] + F.pad(ids, (0, 1), value=3)[:, 1:, None]


def halves(model, x, ids):
    half = x.shape[1] // 2
    return torch.cat([x[:, half:], x[:, :half]], 1) + x.flip(1)


def convolved(model, x, ids):
    return F.conv1d(F.pad(x.mT, (3, 0)), torch.ones(HIDDEN, 1, 4), groups=HIDDEN).mT


def dropped(model, x, ids):
    return F.dropout(x, 0.3) + torch.rand(x.shape[:2])[..., None]


def known(model, x, ids):
    places = torch.arange(x.shape[1])
    return x * 2 if bool((places.diff() == 1).all()) else x


@pytest.mark.parametrize(
    "mix",
    [attend, own_mask, window, positions, means, padded, halves, convolved, dropped, known],
    ids=lambda f: f.__name__,
)
def test_later_lengths_are_not_traced(mix):
    forms = Forms(Model(mix))
    used = {n: forms(batch_of(2, n)) for n in LENGTHS}  # where the half of a length is 1, it is traced
    assert [n for n in LENGTHS if not used[n] and n > 3] == list(LENGTHS[:4])


# ---- what depends on the length in Python: equal to a trace, and mostly one ----


def inverse(model, x, ids):
    return x * (1 / x.shape[1])


def variance(model, x, ids):
    return x / x.var(1, keepdim=True)


def spaced(model, x, ids):
    return x + torch.linspace(0, 1, x.shape[1])[:, None]


def root(model, x, ids):
    return x * math.sqrt(x.shape[1])


def log_scaled(model, x, ids):
    return x * float(np.log(x.shape[1]))


def floored(model, x, ids):
    return x + x[:, : math.floor(x.shape[1] * 0.1 * 7)].sum(1, keepdim=True)


def divided(model, x, ids):
    return x * 2 if x.shape[1] / 3 > 3.1 else x


def clamped(model, x, ids):
    return x + model.head.weight[: x.shape[1] + 4].mean(0) + x[:, -6:].sum(1, keepdim=True)


def split(model, x, ids):
    return torch.cat([part * i for i, part in enumerate([*x.chunk(3, 1), *x.split(4, 1)])], 1)[:, : x.shape[1]]


def paired(model, x, ids):
    return x.reshape(len(x), -1, 2, HIDDEN).flip(2).reshape(x.shape) if x.shape[1] % 2 == 0 else x


def branches(model, x, ids):
    return x * 2 if ids.shape[1] > model.threshold else x


def integer(model, x, ids):
    n = ids.shape[1]
    return x * 2 if isinstance(n, int) and n > model.threshold else x


def of_type(model, x, ids):
    n = ids.shape[1]
    return x * 2 if type(n) is int and n > model.threshold else x


def of_class(model, x, ids):
    n = ids.shape[1]
    return x * 2 if n.__class__ is int and n > model.threshold else x


def matched(model, x, ids):
    match ids.shape[1]:
        case int(n) if n > model.threshold:
            return x * 2
    return x


def named(model, x, ids):
    return x * 2 if f"{ids.shape[1]}" in ("5", "20", "31") else x


def printed(model, x, ids):
    return x * len(str(ids.shape))


def asked(model, x, ids):
    n = ids.shape[1]
    return x * n.bit_length() if hasattr(n, "bit_length") else x


def looked_up(model, x, ids):
    return x * {9: 3.0, 5: 4.0, 20: 5.0}.get(ids.shape[1], 1.0)


def listed(model, x, ids):
    return x * 2 if ids.shape[1] in [5, 20, 31] else x


def counted(model, x, ids):
    return x * sum(1 for _ in range(ids.shape[1]))


def rows(model, x, ids):
    return torch.stack([row * (i + 1) for i, row in enumerate(x.unbind(1))], 1)


def gated(model, x, ids):
    return x * model.gates[ids.shape[1] % 2]


def is_hidden(model, x, ids):
    return x * 2 if x.shape[1] == x.shape[2] else x


def known_count(model, x, ids):
    return x * 2 if int(torch.arange(x.shape[1]).max()) > model.threshold else x


def known_mask(model, x, ids):
    places = torch.arange(x.shape[1])
    return x + x[:, places % 3 == 0].sum(1, keepdim=True)


def caught(model, x, ids):
    try:
        return x * {n: 1.0 for n in (5, 20)}[ids.shape[1]]
    except (KeyError, TypeError):
        return x * 3


@pytest.mark.parametrize(
    "mix",
    [
        inverse,
        floored,
        divided,
        clamped,
        split,
        paired,
        variance,
        spaced,
        root,
        log_scaled,
        branches,
        integer,
        of_type,
        of_class,
        matched,
        named,
        printed,
        asked,
        looked_up,
        listed,
        counted,
        rows,
        gated,
        is_hidden,
        known_count,
        known_mask,
        caught,
    ],
    ids=lambda f: f.__name__,
)
def test_what_python_makes_of_the_length_is_no_constant(mix):
    forms = Forms(Model(mix))
    for n in LENGTHS:
        forms(batch_of(2, n))


def test_a_branch_on_the_length_keeps_the_lengths_of_its_side():
    forms = Forms(Model(branches))
    used = [forms(batch_of(2, n)) for n in (5, 6, 7, 8, 9, 13, 10, 20, 12)]
    assert used == [False] * 4 + [True, False, True, False, True]


# ---- which sizes vary ----


def test_batch_size_and_length_vary_apart():
    forms = Forms(Model(attend))
    used = [forms(batch_of(*s)) for s in ((2, 8), (3, 9), (4, 12), (5, 10), (2, 7), (6, 20), (3, 3), (7, 7))]
    assert used == [False] * 4 + [True] * 4


def test_a_size_of_one_is_traced():
    forms = Forms(Model(attend))
    used = [forms(batch_of(*s)) for s in ((2, 8), (3, 9), (4, 12), (5, 10), (1, 7), (2, 1), (2, 2))]
    assert used == [False] * 6 + [True]


def test_sizes_that_varied_together_and_then_do_not_are_traced():
    forms = Forms(Model(attend))
    used = [forms(batch_of(*s)) for s in ((8, 8), (9, 9), (12, 12), (10, 10), (7, 7), (7, 8))]
    assert used == [False] * 4 + [True, False]


def test_a_batch_that_is_not_contiguous_is_traced_and_the_note_says_so():
    def sliced(n):
        ids = batch_of(2, n + 1)["ids"]
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    forms = Forms(Model(attend))
    assert not any(forms(sliced(n)) for n in (8, 9, 12, 10, 7))
    assert forms.lengths.note == "each length is traced: a tensor of the batch is not contiguous"


def test_one_tensor_in_two_places():
    def twice(n):
        ids = batch_of(2, n)["ids"]
        return {"ids": ids, "labels": ids}

    forms = Forms(Model(attend))
    assert [forms(twice(n)) for n in (8, 9, 12, 10, 7)] == [False] * 4 + [True]
    assert not forms(batch_of(2, 6))  # two tensors: another kind


def test_tensors_that_share_memory_are_another_kind():
    def shared(n):
        ids = batch_of(2, n)["ids"]
        return {"ids": ids, "labels": ids.view_as(ids)}

    forms = Forms(Model(attend))
    assert [forms(batch_of(2, n)) for n in (8, 9, 12, 10, 7)] == [False] * 4 + [True]
    assert not any(forms(shared(n)) for n in (8, 9, 12, 10, 7))


def test_kinds_that_were_not_used_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr(lengths, "_KINDS", 2)
    forms = Forms(Model(attend))
    others = [lambda n, name=name: {**batch_of(2, n), name: torch.zeros(())} for name in ("one", "two")]
    assert [forms(batch_of(2, n)) for n in (8, 9, 12, 10, 7)] == [False] * 4 + [True]
    forms(others[0](8))
    assert forms(batch_of(2, 11))  # used again
    forms(others[1](8))  # the first of the others goes
    assert forms(batch_of(2, 13))
    assert len(forms.lengths._families) == 2


def test_a_few_lengths_do_without_a_trace_with_open_sizes(monkeypatch):
    monkeypatch.undo()
    forms = Forms(Model(attend))
    assert [forms(batch_of(2, n)) for n in (8, 9, 12, 10, 7, 11, 6)] == [False] * 6 + [True]


# ---- what else a step has ----


def test_a_scalar_in_the_batch():
    """As the number of targets that Trainer passes."""
    forms = Forms(Model(attend), lambda model, batch: loss_fn(model, batch) / batch["count"])
    used = [forms(batch_of(2, n) | {"count": torch.tensor(n)}) for n in (8, 9, 12, 10, 7)]
    assert used == [False] * 4 + [True]


def test_accumulation_and_dropout():
    forms = Forms(Model(dropped), accumulate=2)
    assert [forms(batch_of(4, n)) for n in (8, 9, 12, 10, 7, 20)] == [False] * 4 + [True] * 2


def test_without_an_optimizer():
    forms = Forms(Model(attend), optimizer=False)
    assert [forms(batch_of(2, n)) for n in (8, 9, 12, 10, 7)] == [False] * 4 + [True]


def test_each_form_has_learning_rates_of_its_own():
    forms = Forms(Model(attend))
    forms.spec = replace(forms.spec, optimizer=torch.optim.AdamW(forms.spec.model.parameters(), lr=0.1, fused=True))
    forms.update = Update(forms.spec.optimizer)
    assert [forms(batch_of(2, n)) for n in (8, 9, 12, 10, 7)][-1]
    tensors = [lr.data_ptr() for bound in forms.made for lr in bound.lrs.values()]
    assert len(set(tensors)) == len(tensors) == 5


def mask_loss(model, batch):
    hidden = model.embedding(batch["ids"])
    if batch["mask"].all():
        return model.head(hidden).square().mean()
    return (model.head(hidden) * batch["mask"][..., None]).square().mean()


def test_what_python_reads_of_the_batch_is_compared():
    def masked(n, full):
        mask = torch.ones(2, n, dtype=torch.int64)
        mask[0, n // 2 :] = full
        return {"ids": batch_of(2, n)["ids"], "mask": mask}

    forms = Forms(Model(attend), mask_loss)
    used = [forms(masked(n, full)) for n, full in ((8, 1), (9, 1), (12, 1), (10, 1), (7, 0), (6, 1), (6, 0))]
    assert used == [False] * 5 + [True, False]
    latest = forms.made[5]
    assert latest.fits(list(masked(6, 1).values())) and not latest.fits(list(masked(6, 0).values()))


def test_what_changed_in_python_is_seen():
    model = Model(branches)
    forms = Forms(model)
    assert [forms(batch_of(2, n)) for n in (5, 6, 7, 8, 9)][-1]
    model.threshold = 3
    assert [forms(batch_of(2, n)) for n in (10, 5, 6, 7, 8)] == [False] * 4 + [True]


def test_replaced_parameters_are_seen():
    model = Model(attend)
    forms = Forms(model, optimizer=False)
    assert [forms(batch_of(2, n)) for n in (5, 6, 7, 8, 9)][-1]
    model.head.weight = nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    assert not forms(batch_of(2, 10))
    assert any(slot.tensor is model.head.weight for slot in forms.made[-1].traced.slots)


def test_a_model_that_keeps_the_length_is_traced():
    def keeps(model, x, ids):
        model.threshold = ids.shape[1]
        return x * model.threshold

    model = Model(keeps)
    forms = Forms(model)
    with contextlib.suppress(Exception):
        for n in (8, 9, 12, 10, 7):
            assert not forms(batch_of(2, n))
    assert type(model.threshold) is int


def test_functions_of_autograd_and_hooks():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.n = x.shape[1]
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * (2 if ctx.n > 12 else 3)

    forms = Forms(Model(lambda model, x, ids: Doubled.apply(x)))
    used = [forms(batch_of(2, n)) for n in (5, 6, 7, 8, 9, 13)]
    assert used == [False] * 4 + [True, False]


def test_nothing_of_the_trace_stays():
    size = torch.SymInt
    before = dict(vars(size))
    forms = Forms(Model(attend))
    for n in (8, 9, 12, 10, 7):
        forms(batch_of(2, n))
    assert dict(vars(size)) == before
    assert "type" not in globals()


# ---- models of transformers, whose batches have masks ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3_text"])
def test_padded_batches_of_transformers(family, attention):
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    own = {} if family == "gpt2" else dict(num_key_value_heads=1, head_dim=8)
    config = transformers.AutoConfig.for_model(family, **shape, **own, bos_token_id=1, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    def padded(length, missing):
        ids = torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[0, length - missing :] = 0
        return {"input_ids": ids, "labels": ids.where(mask == 1, -100), "attention_mask": mask}

    forms = Forms(model, lambda model, batch: model(**batch, use_cache=False).loss)
    used = [forms(padded(*sizes)) for sizes in ((10, 2), (13, 1), (20, 3), (17, 2), (HIDDEN, 4), (40, 1), (9, 2))]
    assert used == [False] * 4 + [True] * 3


# ---- whole steps ----


def test_a_new_length_that_takes_a_while_is_named(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "stepgraph")
    step = stepgraph.capture(Model(attend), loss_fn, batch_of(2, 9), passes=StepOptions("exact"))
    captured = type(step)._captured

    def slowly(self, *arguments):
        time.sleep(1.5)
        return captured(self, *arguments)

    monkeypatch.setattr(type(step), "_captured", slowly)
    step(batch_of(2, 9))
    step(batch_of(2, 7))
    said = [message for name, _, message in caplog.record_tuples if name == "stepgraph"]
    assert said == ["a different form of batch, batch['ids'] [2, 7]: tracing the step (1 s)"]


@pytest.mark.parametrize("options", [{"passes": "exact"}, {"inductor": "off", "accumulate": 2}], ids=["exact", "off"])
def test_lengths_go_without_a_trace_where_nothing_is_compiled(options):
    """``any_length`` in exact steps, with eager's bits; and with passes that round, but no Inductor."""
    accumulate = options.pop("accumulate", 1)
    models = [Model(own_mask)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    passes = StepOptions(**options, any_length=True)
    step = stepgraph.capture(
        models[1], loss_fn, batch_of(2, 9), optimizers[1], accumulate=accumulate, max_grad_norm=1.0, passes=passes
    )
    for n in (9, 14, 11, 8, 5, 20, 12, 31):
        total = 0
        for part in zip(*(value.chunk(accumulate) for value in batch_of(2, n).values()), strict=True):
            loss = loss_fn(models[0], dict(zip(batch_of(2, n), part, strict=True))) / accumulate
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
        found = step(batch_of(2, n))
        assert torch.equal(found, total) if options.get("passes") == "exact" else torch.allclose(found, total)
    notes = [note for bound in step._forms for r in bound.traced.program.reports for note in r.notes]
    assert notes.count(lengths.NOT_TRACED) >= 4


@pytest.mark.slow
def test_steps_of_any_length_train_as_steps_of_their_own():
    """Losses and parameters of the same batches, each captured separately; of the lengths most were not traced."""
    losses, models = [], []
    for options in (StepOptions(any_length=True), StepOptions("exact")):
        model = Model(own_mask)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = stepgraph.capture(model, loss_fn, batch_of(2, 9), optimizer, passes=options)
        losses.append([step(batch_of(2, n)) for n in (9, 14, 11, 8, HIDDEN, VOCAB, 20, 2, 1, 5, 9)])
        models.append(model)
        if options.any_length:
            notes = [note for bound in step._forms for r in bound.traced.program.reports for note in r.notes]
            assert sum(note == lengths.NOT_TRACED for note in notes) >= 5
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(list(model.parameters()) for model in models))
