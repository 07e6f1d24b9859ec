"""`lower`: one trace per rank, programs of simulated ranks and GPUs, and what memory policies would need of them."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph import compat, parallel
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS
from stepgraph.costs.memory import peak_bytes
from stepgraph.inspect.forecast.forecast import simulated_spec
from stepgraph.lower import StepSpec, copied, lower, peak_bytes_by_policy, rewrite, trace
from stepgraph.models import next_token_loss
from stepgraph.parallel.pipeline.layout import Pipeline
from stepgraph.passes import Target
from stepgraph.train.faults import memory_advice
from tests.distributed.ranks import TINY, in_fake_world

FOUR = dataclasses.replace(TINY, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=512, n_layers=4)
H100 = Target.forecast(GPUS["h100"])


def config(mesh=None, **options):
    settings = {"model": FOUR, "batch_size": 1, "seq_len": 64, "accumulate": 4, "precision": "fp32"} | options
    return TrainConfig(preset="four", mesh=mesh, **settings)


def plain_spec(**options):
    model = stepgraph.models.Llama3(TINY)
    batch = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("tokens", "targets")}
    return StepSpec(model, next_token_loss, batch, torch.optim.AdamW(model.parameters()), **options)


def test_a_captured_step_is_what_lower_gives():
    spec = plain_spec(max_grad_norm=1.0, accumulate=2, passes="exact")
    options = {"max_grad_norm": 1.0, "accumulate": 2, "passes": "exact"}
    makers = (lambda: lower(spec)), lambda: stepgraph.capture(spec.model, next_token_loss, *rest, **options)
    rest = spec.batch, spec.optimizer
    lowered, step = (make() for make in makers)  # from one line, which the text names
    lowered = lowered.program
    assert lowered.text() == step.program.text() and list(lowered.graphs) == ["microbatch", "update"]
    reports = [(report.graph, report.name) for graph in lowered.graphs.values() for report in graph.log]
    assert reports == [(report.graph, report.name) for report in step.report]


def test_the_target_may_be_a_gpu_that_is_not_there():
    spec = plain_spec()
    skipped = {report.name for report in lower(spec).step.log if report.skipped}
    on_gpu = {report.name: report for report in lower(spec, H100).step.log}
    assert "fuse_loss" in skipped and on_gpu["fuse_loss"].acted
    assert "inductor" not in on_gpu  # a simulated GPU compiles nothing


class Attending(torch.nn.Module):
    """Attention of 4 heads, 2 of keys, and dropout of its result."""

    def __init__(self, value_width=16, dropout=0.0, bias=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, width) for width in (64, 32, 2 * value_width))
        self.bias = torch.nn.Parameter(torch.zeros(4, 16, 16)) if bias else None
        self.p, self.dropout = dropout, torch.nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (n, -1)).transpose(1, 2) for layer, n in zip(self.layers, (4, 2, 2), strict=True)
        )
        bias = None if self.bias is None else self.bias[None]
        return self.dropout(F.scaled_dot_product_attention(q, k, v, bias, self.p, bias is None, enable_gqa=True))


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}], ids=str)
def test_the_attention_of_nn_is_traced_as_on_the_gpu(options):
    """`nn.MultiheadAttention` calls torch's attention inside a function of torch's own."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **{"dropout": 0.0} | options).bfloat16()
    batch = {"x": torch.randn(2, 16, 32, dtype=torch.bfloat16), "padded": torch.arange(16).expand(2, 16) > 12}

    def loss_fn(model, batch):
        return model(batch["x"], src_key_padding_mask=batch["padded"]).float().square().mean()

    targets = {str(node.target) for node in lower(StepSpec(layer, loss_fn, batch), H100).step.nodes()}
    assert "aten._scaled_dot_product_cudnn_attention_backward.default" in targets
    assert not any("softmax" in target for target in targets)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [{}, {"value_width": 24}, {"bias": True}, {"dropout": 0.1}], ids=str)
def test_attention_and_dropout_are_traced_as_on_the_gpu(form, dtype):
    """What a CPU makes of it is products, a softmax of every score, and a mask of numbers. For a mask with a gradient a
    GPU has no kernel either: T5 base takes 14 GiB on an H100."""
    model = Attending(**form).to(dtype)
    spec = StepSpec(model, lambda m, x: m(x).square().mean(), torch.zeros(2, 16, 32, dtype=dtype), passes="default")
    nodes = list(lower(spec, H100).step.nodes())
    targets = {str(node.target) for node in nodes}
    kernel = "cudnn" if dtype is torch.bfloat16 else "efficient" if form else "flash"
    ends = ("_for_cpu", "_for_cpu_backward") if kernel == "flash" else ("", "_backward")
    expected = {f"aten._scaled_dot_product_{kernel}_attention{end}.default" for end in ends}
    assert {name for name in targets if "attention" in name} == (set() if "bias" in form else expected)
    assert "aten.native_dropout.default" in targets and not any("bernoulli" in name for name in targets)
    on_cpu = {str(node.target) for node in trace(spec).step.nodes()}
    assert "aten.native_dropout.default" not in on_cpu and not any("cudnn" in name for name in on_cpu)


def test_a_copy_is_rewritten_and_its_original_is_not():
    spec = plain_spec(accumulate=2)
    program = trace(spec).program
    before = program.text()
    made = rewrite(copied(program), spec, H100)
    assert program.text() == before != made.text()
    assert all(graph.log == [] and graph.executable is graph.module for graph in program.graphs.values())
    assert made.text() == rewrite(program, spec, H100).text()


def check_pipeline():
    made = config("pp=2", memory="none")
    with mock.patch.object(compat, "trace", wraps=compat.trace) as traces:
        mesh = parallel.Mesh(made.mesh_spec, "cpu")
        spec = simulated_spec(made, mesh)
        planned = traces.call_count
        program = lower(spec, H100).program
    assert traces.call_count - planned == 2  # one microbatch and the update
    assert {"forward.0", "backward.0", "send_forward.0", "update"} < program.graphs.keys()
    assert isinstance(spec.placement.pipeline, Pipeline)
    with pytest.raises(ValueError, match="the model holds one in a pipeline"):
        stepgraph.capture(torch.nn.Sequential(spec.model), spec.loss_fn, spec.batch, accumulate=4)

    # What one rank needs: its own stage and the microbatches that are in flight there, not the whole model.
    here = peak_bytes_by_policy(spec, H100)
    assert list(here) == ["none", "selective", "full"] and here["none"] == peak_bytes(program)
    assert here["none"] > here["selective"] > here["full"]
    state = sum(p.nbytes for p in parallel.held_parameters(spec.model).values())
    assert here["full"] > 4 * state  # parameters, sums of gradients and two moments
    exact = peak_bytes_by_policy(dataclasses.replace(spec, passes="exact"), H100)
    # Where the loss is not fused the logits lie there more than once, but the last stage alone has them.
    assert exact["none"] == pytest.approx(here["none"], rel=0.2)

    advice = memory_advice(torch.OutOfMemoryError("Tried to allocate 20.00 GiB"), made, lambda: spec)
    alone = peak_bytes_by_policy(plain_of(made), H100)
    assert here["none"] < 0.7 * alone["none"] and "out of memory: asked for 20.00 GiB" in advice


def plain_of(made):
    """The same step on one rank."""
    from stepgraph.config import build

    alone = dataclasses.replace(made, mesh=None)
    model = build.empty_model(alone, torch.device("cpu"))
    batch = build.example_batch(alone, torch.device("cpu"))
    optimizer = build.build_optimizer(alone, model)
    return build.step_spec(alone, model, build.build_loss(alone, torch.device("cpu")), batch, optimizer)


def test_a_rank_of_a_pipeline_traces_once_and_is_charged_its_own_stage():
    in_fake_world(0, 2, check_pipeline)


def test_the_estimate_sees_a_loss_in_parts():
    """Logits of a large vocabulary are most of this step; in parts of the tokens they never lie there whole."""
    made = config(accumulate=1, batch_size=8, model=dataclasses.replace(FOUR, vocab_size=8192, n_layers=1))
    spec = plain_of(made)
    whole, parts = (
        peak_bytes_by_policy(dataclasses.replace(spec, passes=dataclasses.replace(made, loss_chunks=n)), H100)["none"]
        for n in (1, 8)
    )
    logits = 8 * 64 * 8192 * 4
    assert whole - parts > 0.5 * logits
