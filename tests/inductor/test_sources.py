"""Which kernels Inductor's code holds, and which nodes of its graph each computes."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.costs.hardware import GPUS
from stepgraph.graph.step_graph import Call, Kind
from stepgraph.inductor.library import kernels_of
from stepgraph.inspect.account.graph import graph_account
from stepgraph.passes import get

TRITON = """r\"\"\"
Tuning program:
triton_add_0 = async_compile.triton('triton_add_0', '''
other text
''', device_str='cuda')
\"\"\"
# kernel path: /somewhere/a.py
# Topologically Sorted Source Nodes: [wrong], Original ATen: [aten.add]
triton_add_0 = async_compile.triton('triton_add_0', '''
import triton

@triton_heuristics.pointwise(
    size_hints={'x': 16},
)
@triton.jit
def triton_add_0(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    pass
''', device_str='cuda')


triton_sum_1 = async_compile.triton('triton_sum_1', '''
@triton.jit
def triton_sum_1(in_ptr0):
    pass
''', device_str='cuda')


def call(args):
        # Topologically Sorted Source Nodes: [mul, add], Original ATen: [aten.mul, aten.add]
        stream0 = get_raw_stream(0)
        triton_add_0.run(arg0_1, buf0, 16, stream=stream0)
        # Topologically Sorted Source Nodes: [mm], Original ATen: [aten.mm]
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        triton_sum_1.run(buf1, stream=stream0)
        # Topologically Sorted Source Nodes: [add_1, add], Original ATen: [aten.add]
        triton_add_0.run(arg2_1, buf2, 16, stream=stream0)
"""


def test_triton_kernels_and_the_nodes_that_inductor_names():
    add, total = kernels_of(TRITON)
    assert (add.name, add.nodes) == ("triton_add_0", ["mul", "add", "add_1"])
    assert add.text.startswith("@triton.jit\ndef triton_add_0(") and "heuristics" not in add.text
    assert (total.name, total.nodes) == ("triton_sum_1", [])  # the name before was a product's


def test_there_may_be_none():
    assert kernels_of("") == kernels_of("def call(args):\n    return (args[0],)\n") == []


@pytest.mark.slow
def test_a_graph_says_what_inductor_generated_for_each_of_its_nodes():
    batch = torch.randn(8, 16)
    passes = ["fuse_norm", "tag_regions", get("inductor", mode="regional")]
    model = nn.Sequential(nn.RMSNorm(16), nn.RMSNorm(16))
    step = stepgraph.capture(model, lambda model, batch: model(batch).square().mean(), batch, passes=passes)
    found = graph_account(step.graph, Call(Kind.STEP), 1, GPUS["h200"], {}, fused=True, ran=True)
    compiled = {i for i, piece in enumerate(found["nodes"]["piece"]) if piece >= 0}
    assert compiled and {node for node, _ in found["made"]} == compiled
    names, texts = zip(*found["generated"], strict=True)
    assert len(set(texts)) == len(texts) >= len(set(names)) and all("kernel(" in text for text in texts)
    assert {place for _, places in found["made"] for place in places} == set(range(len(texts)))
