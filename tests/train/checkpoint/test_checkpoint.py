"""Checkpoints come back bit for bit: parameters, optimizer, data position, random streams, plain values."""

import json
import math
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stepgraph.train.checkpoint.checkpointer import Checkpointer
from stepgraph.train.checkpoint.state import decode, encode
from tests.train.checkpoint.cases import OPTIMIZERS, Tiny, build, contents, equal, seed_all, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_is_bitwise_equal_to_never_stopping(tmp_path, optimizer, dtype):
    seed_all(0)
    state = build(1, optimizer, dtype=dtype)
    train(state, 3)
    path = Checkpointer(tmp_path).save(3, state)
    at_save = contents(state)
    train(state, 3)
    streams = [torch.rand(3), torch.from_numpy(np.random.rand(3)), random.random(), random.gauss(0, 1)]

    seed_all(99)
    fresh = build(2, optimizer, dtype=dtype)
    fresh["trainer"] = {"junk": 1}
    Checkpointer(tmp_path).load(path, fresh)
    assert equal(contents(fresh), at_save)
    assert fresh["model"].head.weight is fresh["model"].embed.weight
    train(fresh, 3)
    assert equal(contents(fresh), contents(state))
    assert equal([torch.rand(3), torch.from_numpy(np.random.rand(3)), random.random(), random.gauss(0, 1)], streams)


def test_a_save_disturbs_nothing(tmp_path):
    runs = []
    for saves in (False, True):
        seed_all(0)
        state = build(1)
        for step in range(3):
            train(state, 1)
            if saves:
                Checkpointer(tmp_path).save(step, state)
        runs.append((contents(state), torch.rand(2), random.random()))
    assert equal(*runs)


def test_existing_tensors_are_filled_in_place(tmp_path):
    state = build(1, "master-tensor-lr")
    train(state, 2)
    path = Checkpointer(tmp_path).save(2, state)
    before = contents(state)

    def addresses() -> list:
        slots = [v for s in state["optimizer"].state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        tensors = [*state["model"].state_dict(keep_vars=True).values(), *slots]
        return [t.data_ptr() for t in tensors] + [id(state["optimizer"].param_groups[0]["lr"])]

    where = addresses()
    train(state, 1)
    Checkpointer(tmp_path).load(path, state)
    assert addresses() == where
    assert equal(contents(state), before)


@pytest.mark.parametrize("optimizer", ["adamw", "master"])
def test_never_stepped_checkpoint_clears_a_stepped_optimizer(tmp_path, optimizer):
    state = build(1, optimizer)
    path = Checkpointer(tmp_path).save(0, state)
    before = contents(state)
    assert before["optimizer"]["state"] == {}
    train(state, 2)
    Checkpointer(tmp_path).load(path, state)
    assert equal(contents(state), before)


def test_tensors_are_what_plain_dcp_reads_under_parameter_names(saved):
    checkpointer, state = saved
    names = dcp.FileSystemReader(checkpointer.latest()).read_metadata().state_dict_metadata
    assert {n for n in names if n.startswith("model.")} == {
        *("model." + n for n, _ in state["model"].named_parameters()),
        *("model." + n for n, _ in state["model"].named_buffers()),
    }
    target = {"model.mix.weight": torch.zeros(8, 8), "optimizer.mix.weight.exp_avg": torch.zeros(8, 8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=checkpointer.latest())
    weight = state["model"].mix.weight
    assert torch.equal(target["model.mix.weight"], weight)
    assert torch.equal(target["optimizer.mix.weight.exp_avg"], state["optimizer"].state[weight]["exp_avg"])


def test_weights_alone_leave_the_random_streams(saved):
    checkpointer, state = saved
    model, before = Tiny(), torch.get_rng_state()
    checkpointer.load(checkpointer.folder.parent, {"model": model}, rng=False)
    assert equal(dict(model.state_dict()), dict(state["model"].state_dict()))
    assert torch.equal(torch.get_rng_state(), before)


def test_compiled_model_shares_checkpoints_with_the_plain_one(saved):
    checkpointer, state = saved
    model = Tiny()
    checkpointer.load(checkpointer.latest(), {"model": torch.compile(model)})
    assert equal(dict(model.state_dict()), dict(state["model"].state_dict()))


def test_odd_tensors(tmp_path):
    def odd() -> nn.Module:
        model = nn.Module()
        model.register_buffer("empty", torch.empty(0, 3))
        model.register_buffer("flag", torch.rand(()) > 0.5)
        model.register_buffer("strided", torch.randn(4, 6).t()[::2])
        model.register_buffer("special", torch.tensor([math.nan, -0.0, math.inf, 1e-45]))
        model.register_buffer("small", torch.randn(5).to(torch.float8_e4m3fn))
        model.register_buffer("not_saved", torch.randn(2), persistent=False)
        return model

    first, second = odd(), odd()
    keep = second.not_saved.clone()
    Checkpointer(tmp_path).load(Checkpointer(tmp_path).save(0, {"model": first}), {"model": second})
    assert equal(dict(first.state_dict()), dict(second.state_dict()))
    assert torch.equal(second.not_saved, keep)


def test_no_warning_in_one_process(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = build(1)
        Checkpointer(tmp_path).load(Checkpointer(tmp_path).save(1, state), state)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5).filter(lambda k: not k.startswith("$")), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(plain)
def test_json_values_come_back_exactly(value):
    assert equal(decode(json.loads(json.dumps(encode(value, "value")))), value)


@pytest.mark.parametrize("value", [{1: 2}, {"$tuple": 3}, {1, 2}, np.zeros(2), object(), b"bytes"])
def test_values_json_would_change_are_refused(tmp_path, value):
    state = build(1) | {"trainer": {"deep": [{"inner": value}]}}
    with pytest.raises(ValueError, match=r"^trainer\.deep\[0\]\.inner has type .*convert it") as caught:
        Checkpointer(tmp_path).save(1, state)
    assert "\n" not in str(caught.value)
    assert Checkpointer(tmp_path).latest() is None
