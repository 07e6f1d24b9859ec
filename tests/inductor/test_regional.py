"""Regions compiled with Inductor on a CPU: their own options, once for each structure, close to eager, kept on disk."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph import compat
from stepgraph.inductor.regional import Region, compile_pieces, nodes_of, tag
from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, next_token_loss
from stepgraph.passes import configured, get
from stepgraph.passes.compile.gather import gather

# Inductor's C++ compiler takes most of a test's time.
pytestmark = pytest.mark.slow

CONFIG = {"fallback_random": True}


def operators(function, *inputs):
    """``function`` as a flat graph, and its operators in order."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    return module, [node for node in module.graph.nodes if node.op == "call_function"]


def test_each_region_is_compiled_with_its_own_options():
    """Inductor can be told to compile one operator wrongly. Told so for ReLU in one region and for log1p in another,
    each is wrong where it was said and nowhere else: ReLU gives ``x + 1``, log1p does the same."""

    def function(x):
        return tuple(torch.log1p(torch.relu(x) * 2) for _ in range(4))

    x = torch.rand(64)
    module, nodes = operators(function, x)
    relu, log1p = (((f"cpp.inject_{name}_bug_TESTING_ONLY", "accuracy"),) for name in ("relu", "log1p"))
    for i, options in enumerate((relu, log1p, ())):  # the fourth stays eager
        tag(nodes[3 * i : 3 * i + 3], Region(f"r{i}", "test", options))
    pieces, notes = gather(module.graph)
    compilation = compile_pieces(module, pieces, CONFIG)
    a, b, c, d = compilation.module(x)
    assert len(compilation.compiled) == 3 and notes == []
    torch.testing.assert_close(a, torch.log1p((x + 1) * 2))
    torch.testing.assert_close(b, x * 2 + 1)
    torch.testing.assert_close(c, torch.log1p(x * 2))
    assert torch.equal(d, torch.log1p(x * 2))


def test_an_option_that_does_not_exist_is_refused():
    module, nodes = operators(lambda x: x.sin().cos(), torch.rand(4))
    tag(nodes, Region("r", "test", (("max_fusion_siz", 3),)))
    with pytest.raises(ValueError, match=r"unknown option of Inductor \(region r\) 'max_fusion_siz': did you mean"):
        compile_pieces(module, gather(module.graph)[0], CONFIG)


def test_what_a_piece_reads_last_is_freed_and_views_leave_it():
    """The list of arguments comes back empty; a view of an argument and one of a result are results as well."""

    def function(x):
        y = x.t()
        z = (x * 2).exp()
        return y.sin(), y, z.view(-1), z

    x = torch.rand(4, 6)
    module, nodes = operators(function, x)
    tag(nodes, Region("r", "test"))
    compilation = compile_pieces(module, gather(module.graph)[0], CONFIG)
    (call,) = compilation.module.graph.find_nodes(op="call_module")
    args = [x]
    getattr(compilation.module, call.target).boxed(args)
    assert args == []
    for actual, expected in zip(compilation.module(x), function(x), strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


# Models


def hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=37, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def hugging_face_loss(model, batch):
    return F.cross_entropy(model(batch["tokens"], use_cache=False).logits.flatten(0, 1), batch["targets"].flatten())


def llama(n_layers=2):
    return Llama3(
        Llama3Config(dim=32, n_layers=n_layers, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=37, max_seq_len=16)
    )


def golf():
    return Golf(GolfConfig(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=37))


def tokens():
    ids = torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(1))
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def gradients(model, loss_fn, passes):
    """(loss, gradients, captured step) of a copy of ``model``; eager where ``passes`` is None."""
    model, batch, step = copy.deepcopy(model), tokens(), None
    if passes is None:
        loss = loss_fn(model, batch)
        loss.backward()
    else:
        step = stepgraph.capture(model, loss_fn, batch, passes=passes)
        loss = step(batch)
    return loss.detach().double(), {name: p.grad.double() for name, p in model.named_parameters()}, step


MODELS = {
    "llama": (llama, next_token_loss, "rope 8, swiglu 4, norm 10"),
    "golf": (golf, next_token_loss, "rope found nothing, swiglu found nothing, norm 20"),
    "hugging face": (hugging_face, hugging_face_loss, "rope 8, swiglu 4, norm 10"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("golf", torch.float32, marks=pytest.mark.long),
        pytest.param("hugging face", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_models_train_as_eager(name, dtype):
    """Against the same model in float64. What a region computes in one kernel is rounded less often than eager does, so
    its error may be no larger than eager's by more than chance: twice, and in fp32 a floor of some ulps (1e-6)."""
    torch.manual_seed(0)
    build, loss_fn, counts = MODELS[name]
    model = build().to(dtype)
    exact_loss, exact, _ = gradients(model.double(), loss_fn, None)
    model = model.to(dtype)
    eager_loss, eager, _ = gradients(model, loss_fn, None)
    loss, grads, step = gradients(model, loss_fn, configured(inductor="regional"))
    floor = 1e-6 if dtype == torch.float32 else 2e-3
    assert abs(loss - exact_loss) <= 2 * abs(eager_loss - exact_loss) + floor
    for key, value in exact.items():
        error, eagers = ((g[key] - value).norm() / value.norm() for g in (grads, eager))
        assert error <= 2 * eagers + floor, f"{key}: {error:.1e}, eager {eagers:.1e}"
    tags, report = (next(r for r in step.report if r.name == name) for name in ("tag_regions", "inductor"))
    assert f"regions: attention found nothing, {counts}" in tags.notes
    assert report.compile_s > 0 and "compiled pieces of" in report.summary


def test_two_runs_are_bitwise_equal_and_so_is_what_lies_outside():
    """Where nothing is tagged, the regional mode changes nothing at all."""
    torch.manual_seed(0)
    model = llama()
    regional = ["tag_regions", get("inductor", mode="regional")]
    first, second = (gradients(model, next_token_loss, regional) for _ in range(2))
    untouched = gradients(model, next_token_loss, [get("inductor", mode="regional")])
    eager = gradients(model, next_token_loss, None)
    for (a_loss, a, _), (b_loss, b, _) in ((first, second), (untouched, eager)):
        assert a_loss == b_loss and all(torch.equal(a[key], b[key]) for key in a)


def test_layers_share_what_was_compiled(monkeypatch):
    waits, started = [], []

    def counted(*args, on_first, **options):
        return compile_pieces(*args, on_first=lambda: started.append(len(waits)), **options)

    monkeypatch.setattr(compat, "await_compile_workers", lambda: waits.append(True))
    monkeypatch.setattr(sys.modules["stepgraph.passes.compile.inductor"], "compile_pieces", counted)
    _, made = compat.inductor_cache_counts()
    step = gradients(
        llama(n_layers=4), next_token_loss, ["fuse_norm", "tag_regions", get("inductor", mode="regional")]
    )[2]
    calls = step.graph.executable.graph.find_nodes(op="call_module")
    modules = {id(getattr(step.graph.executable, call.target)) for call in calls}
    assert len(calls) == 42 and len(modules) == 11  # 16 rotations of 4 forms, 8 products of 2, 18 norms of 5
    assert "42 compiled pieces of 11 structures" in step.report[-1].summary
    assert len(waits) == compat.inductor_cache_counts()[1] - made  # for none that was on disk
    assert started == [0]  # before any is compiled
    # Each piece points back to the nodes that it stands for, in the graph that stays readable.
    names = [name for call in calls for name in nodes_of(call)]
    assert len(names) == len(set(names)) > 42 and {node.name for node in step.graph.graph.nodes}.issuperset(names)


SCRIPT = """
import sys, torch, stepgraph
from torch import nn
from stepgraph.passes import get

for mode in sys.argv[1:]:
    passes = ["fuse_norm", "tag_regions", get("inductor", mode=mode)]
    batch = torch.randn(8, 16)
    step = stepgraph.capture(nn.RMSNorm(16), lambda model, batch: model(batch).square().mean(), batch, passes=passes)
    step(batch)
    print(mode, step.report[-1].summary.partition("(")[2])
"""


@pytest.mark.parametrize(
    "modes", [pytest.param(m, marks=pytest.mark.long) for m in [("regional",), ("regional", "full")]]
)
def test_a_second_process_loads_from_disk(tmp_path, modes):
    root = str(Path(stepgraph.__file__).parents[1])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}

    def run(*modes):
        command = [sys.executable, "-c", SCRIPT, *modes]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    pieces = {"regional": 2, "full": 1}
    note = "{} {} of {} loaded from disk)"
    assert run(*modes) == [note.format(mode, 0, pieces[mode]) for mode in modes]
    assert run(*modes) == [note.format(mode, pieces[mode], pieces[mode]) for mode in modes]
