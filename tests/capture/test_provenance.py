"""Every node of a real model's graph knows its module path, its phase and its source line."""

import functools
import inspect
import linecache
import os
from collections import Counter

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.graph.provenance import provenance
from stepgraph.graph.values import Parameter
from stepgraph.models import Llama3, Llama3Config, decoder, next_token_loss
from stepgraph.models import loss as loss_module

aten = torch.ops.aten
#: Folders whose frames are no user's source line.
NOT_THE_USERS = tuple(os.path.join(os.path.dirname(stepgraph.__file__), room, "") for room in ("capture", "compat"))
TINY = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=61, max_seq_len=32)


def llama(fused):
    model = Llama3(TINY)
    ids = torch.randint(61, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    batch = {"tokens": ids, "targets": ids}
    step = stepgraph.capture(model, next_token_loss, batch, optimizer, max_grad_norm=1.0, accumulate=2, passes=[])
    return model, step


def hugging_face(make):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "vocab_size": 53}
    if make == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, **sizes
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=53))
    ids = torch.randint(53, (4, 12))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters())
    step = stepgraph.capture(
        model.train(), lambda m, b: m(**b).loss, batch, optimizer, max_grad_norm=1.0, accumulate=2, passes=[]
    )
    return model, step


GRAPHS = {
    "llama-fused": lambda: llama(True),
    "llama-unfused": lambda: llama(False),
    "hf-llama": lambda: hugging_face("llama"),
    "hf-gpt2": lambda: hugging_face("gpt2"),
}


@functools.cache
def program(name):
    """Model and captured step; every test only reads them."""
    return GRAPHS[name]()


def captured(name, graph="microbatch"):
    model, step = program(name)
    return model, step.graphs[graph]


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_is_attributed(name):
    model, step = program(name)
    paths = dict(model.named_modules())
    found = []
    for graph, phases in (("microbatch", {"forward", "loss", "backward"}), ("update", {"optimizer"})):
        here = [provenance(node) for node in step.graphs[graph].nodes()]
        assert all(f is not None for f in here)
        assert {f.phase for f in here} == phases
        assert sum(step.graphs[graph].count_by_phase().values()) == len(here)
        found += here
    assert {f.path for f in found} <= paths.keys()
    for f in found:
        file, _, line = f.source.rpartition(":")
        assert os.path.isfile(file), f
        assert linecache.getline(file, int(line)).strip(), f
        assert os.sep + "torch" + os.sep not in file
        assert not file.startswith(NOT_THE_USERS)


def leaf_products(graph, phase, path):
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return [n for n in graph.nodes(phase) if n.target in products and provenance(n).path == path]


def test_backward_products_belong_to_their_layer():
    model, graph = captured("llama-fused")
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert len(leaf_products(graph, "forward", path)) == 1, path
            backward = leaf_products(graph, "backward", path)
            assert len(backward) == 2, path  # gradients of input and weight
            weight = tuple(module.weight.shape)
            shapes = sorted(tuple(n.meta["val"].shape) for n in backward)
            assert sum(s in (weight, weight[::-1]) for s in shapes) >= 1, path
    products = [n for n in graph.nodes("backward") if n.target is aten.mm.default]
    assert len(products) == 2 * sum(isinstance(m, nn.Linear) for m in model.modules())


def test_norms_and_attention_in_backward_belong_to_their_modules():
    _, graph = captured("llama-fused")
    for i in range(2):
        for name in ("attn_norm", "mlp_norm", "attn", "mlp"):
            assert any(provenance(n).path == f"layers.{i}.{name}" for n in graph.nodes("backward")), name
    attention = [n for n in graph.nodes("backward") if "attention" in str(n.target)]
    assert [provenance(n).path for n in attention] == ["layers.1.attn", "layers.0.attn"]
    assert {graph.block_of(n) for n in attention} == {"layers.0", "layers.1"}


def test_source_lines_are_the_models():
    _, graph = captured("llama-fused")
    lines, first = inspect.getsourcelines(decoder.SwiGLU.forward)
    span = {f"{decoder.__file__}:{first + i}" for i in range(len(lines))}
    for phase in ("forward", "backward"):
        found = {provenance(n).source for n in graph.nodes(phase) if provenance(n).path.endswith("mlp.up_proj")}
        assert found
        assert found <= span
    losses = {provenance(n).source.rpartition(":")[0] for n in graph.nodes("loss")}
    assert losses <= {loss_module.__file__, __file__}


def test_updates_belong_to_the_modules_of_their_parameters():
    model, graph = captured("llama-unfused", "update")
    updated = {provenance(n).path for n in graph.nodes("optimizer") if n.target is aten.lerp_.Scalar}
    assert updated == {path for path, module in model.named_modules() if list(module.parameters(recurse=False))}


def test_additions_to_accumulators_belong_to_their_parameters():
    model, graph = captured("llama-fused")
    sums = {n.args[0].name: provenance(n) for n in graph.nodes("backward") if n.target is aten.add_.Tensor}
    assert len(sums) == len(list(model.parameters()))
    assert sums["accumulator_layers_0_mlp_up_proj_weight"].path == "layers.0.mlp.up_proj"


def test_inputs_are_named():
    model, graph = captured("llama-fused")
    _, update = captured("llama-fused", "update")
    named = dict(model.named_parameters()).keys()
    assert {s.what.name for s in graph.inputs if s.what.kind == "parameter"} == named
    assert {s.what.name for s in graph.inputs if s.what.kind == "accumulator"} == named
    assert Counter(s.what.kind for s in graph.inputs)["batch"] == 1  # one tensor is tokens and targets
    counts = Counter(s.what.kind for s in update.inputs)
    assert counts["lr"] == 1
    assert counts["optimizer"] == 3 * len(named)
    assert counts["accumulator"] == len(named)
    assert "batch" not in counts
    names = [n.name for n in graph.placeholders(Parameter)]
    assert "parameter_layers_0_mlp_up_proj_weight" in names


def test_text_reads_line_by_line():
    _, graph = captured("llama-fused")
    lines = graph.text().splitlines()
    assert len(lines) == len(graph.graph.nodes)
    product = next(line for line in lines if line.startswith("mm: "))
    assert product.startswith("mm: float32[32, 32] = aten.mm(")
    assert "# forward layers.0.attn.q_proj decoder.py:" in product
    assert lines[-1].startswith("return ")
    assert lines[-1].endswith("# loss:loss")
    assert captured("llama-fused", "update")[1].text().splitlines()[-1].endswith("# metric:grad_norm")
    assert max(map(len, lines)) < 1200
