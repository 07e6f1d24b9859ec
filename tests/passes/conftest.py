"""Training cases, run eagerly once and captured once; a test runs any passes on a copy of a case's graph."""

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.capture import InputSpec, Provenance, StepGraph, Traced, set_provenance, trace_step
from stepgraph.graph.facts import is_view
from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import GroupValue, HostValue, Input, Metric, ModelTensor, Parameter
from stepgraph.kernels.comm.exchange import Session
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import PassReport, run_passes
from stepgraph.run.memory import Memory
from stepgraph.run.program import ProgramRunner

STEPS = 10
TINY = Llama3Config(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=37, max_seq_len=16)


def tokens(vocab: int = 37, batch: int = 4, length: int = 8, n: int = 3) -> list[dict[str, torch.Tensor]]:
    """``n`` batches of (B, T) int64 ``tokens`` and ``targets``."""
    ids = torch.randint(vocab, (n, batch, length + 1), generator=torch.Generator().manual_seed(1))
    return [{"tokens": i[:, :-1].contiguous(), "targets": i[:, 1:].contiguous()} for i in ids]


def vectors(*shape: int, n: int = 3) -> list[dict[str, torch.Tensor]]:
    """``n`` batches of fp32 ``x`` and ``y`` of the given shape."""
    generator = torch.Generator().manual_seed(1)
    return [{key: torch.randn(*shape, generator=generator) for key in ("x", "y")} for _ in range(n)]


def mse(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def autocast_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(model, batch)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, **options)


fused_adamw = functools.partial(adamw, fused=True)


def master_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return stepgraph.MasterAdamW(model.parameters(), lr=3e-3)


class Residual(nn.Module):
    """A block with dropout, as the elements of a ``ModuleList`` are."""

    def __init__(self, width: int, p: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


class Tower(nn.Module):
    """Blocks called plainly or through ``torch.utils.checkpoint``."""

    def __init__(self, wrap: Callable | None = None, p: float = 0.2, n: int = 3, width: int = 12):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width, p) for _ in range(n))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap else block(x)
        return x


class Writes(nn.Module):
    """In-place operators on values, views and a buffer, between operators whose results backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        before = torch.exp(h) * self.w  # saved for backward, and h is written next
        h.mul_(2)
        h[:, 1:3] = 0.5
        a, b = h.chunk(2, dim=1)
        a.add_(torch.tanh(b))
        between = torch.sin(h) * self.w
        h.masked_fill_(h > 1, 0.25)
        h.index_put_((torch.tensor([0, 2]),), torch.full((8,), -1.0))
        first, *_ = h.unbind(0)
        first.copy_(self.seen)
        self.seen.lerp_(h.detach().mean(0), 0.1)
        g = self.w * self.v
        g = g.view(-1).view(6, 8)
        g += torch.cos(h)
        left, right = g.split([3, 5], dim=1)
        return before + between + torch.cat([right, left], 1) * h.double().float().sigmoid()


class ComplexRotation(nn.Module):
    """Rotation by complex numbers: its backward conjugates, by a view that changes no stride."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("turn", torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.linear(x).view(6, 4, 2))
        return torch.view_as_real(z * self.turn * z.conj() * self.turn.conj() + z).reshape(6, 8)


class Casts(nn.Module):
    """Literals, and casts to and fro of a bf16 stream, one of them written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x.bfloat16())
        wide = h.float()
        written = h.detach().float()
        written[:, 0] = 3.0
        scale = torch.tensor(0.37).to(torch.float64).to(torch.bfloat16)
        mask = torch.tensor([1.0, 0.0] * 4)
        mask[1] = 0.5
        return (wide.bfloat16() * h.float() + h.float() * scale + written.bfloat16()) * mask


class Recurrent(nn.Module):
    """An LSTM cell: its gates are chunks that torch writes in place although their operator declares no views."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        state, outputs = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(state[0])
        return torch.stack(outputs, 1)


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=37, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def hugging_face_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"], use_cache=False).logits.flatten(0, 1), batch["targets"].flatten())


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return Llama3(replace(TINY, **changes)).to(dtype)


@dataclass(frozen=True)
class Case:
    """How to build a model and train it. Hashable: each case is run eagerly, and captured, once."""

    build: Callable[[], nn.Module]
    loss_fn: Callable = next_token_loss
    batches: Callable[[], list] = tokens
    optimizer: Callable | None = fused_adamw
    max_grad_norm: float | None = 0.1
    accumulate: int = 1


BF16 = torch.bfloat16
CASES = {
    "llama": Case(llama, optimizer=adamw),
    "llama bf16": Case(functools.partial(llama, BF16)),
    "llama bf16, master weights, accumulated": Case(
        functools.partial(llama, BF16, n_layers=1), optimizer=master_adamw, accumulate=2
    ),
    "llama gradients": Case(llama, optimizer=None, max_grad_norm=None),
    "llama bf16 gradients, accumulated": Case(
        functools.partial(llama, BF16), optimizer=None, max_grad_norm=None, accumulate=2
    ),
    "tied": Case(functools.partial(llama, tie_embeddings=True)),
    "autocast": Case(llama, autocast_loss, optimizer=adamw),
    "hugging face": Case(hugging_face, hugging_face_loss),
    "dropout": Case(Tower, mse, functools.partial(vectors, 6, 12), adamw),
    "dropout gradients": Case(Tower, mse, functools.partial(vectors, 6, 12), None, None),
    "no blocks": Case(lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)), mse,
                      functools.partial(vectors, 6, 12)),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12)), mse,
        functools.partial(vectors, 6, 12), accumulate=2,
    ),
    "checkpoint": Case(lambda: Tower(functools.partial(checkpoint, use_reentrant=False)), mse,
                       functools.partial(vectors, 6, 12), adamw),
    "writes": Case(Writes, mse, functools.partial(vectors, 6, 8), adamw),
    "writes, gradients": Case(Writes, mse, functools.partial(vectors, 6, 8), None, None),
    "complex": Case(ComplexRotation, mse, functools.partial(vectors, 6, 8), adamw),
    "casts": Case(Casts, mse, functools.partial(vectors, 6, 8)),
    "recurrent": Case(Recurrent, mse, functools.partial(vectors, 2, 3, 8), adamw),
}  # fmt: skip

Record = dict[str, torch.Tensor]


@functools.cache
def prepared(name: str) -> tuple[list[Record], Traced, torch.optim.Optimizer | None, list]:
    """(what eager training gives after each step, the captured step at the start, its optimizer, the batches)."""
    case = CASES[name]
    torch.manual_seed(0)
    model, batches = case.build(), case.batches()
    captured = copy.deepcopy(model)
    optimizer = case.optimizer(captured) if case.optimizer else None
    traced = trace_step(captured, case.loss_fn, batches[0], optimizer, max_grad_norm=case.max_grad_norm,
                        accumulate=case.accumulate)  # fmt: skip
    return eager_records(case, model, batches), traced, optimizer, batches


def eager_records(case: Case, model: nn.Module, batches: Sequence[dict]) -> list[Record]:
    """Loss, gradient norm, gradients or parameters, and buffers after each of ``STEPS`` plain steps."""
    optimizer = case.optimizer(model) if case.optimizer else torch.optim.SGD(model.parameters(), lr=0.05)
    records = []
    torch.manual_seed(2)
    for i in range(STEPS):
        batch, total = batches[i % len(batches)], None
        for k in range(case.accumulate):
            loss = case.loss_fn(model, {key: value.chunk(case.accumulate)[k] for key, value in batch.items()})
            loss = loss / case.accumulate if case.accumulate > 1 else loss
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        record = {"loss": total}
        if case.max_grad_norm is not None:
            record["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        if case.optimizer is None:
            record |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        record |= {n: p.detach().clone() for n, p in model.named_parameters()}
        record |= {n: b.clone() for n, b in model.named_buffers()}
        record["generator"] = torch.get_rng_state()
        records.append(record)
    return records


def copied(step: StepGraph) -> StepGraph:
    """A copy whose graph may be rewritten."""
    module = fx.GraphModule(step.module, copy.deepcopy(step.graph))
    return replace(step, module=module, executable=None, recording=None, log=[])


def rebound(program: StepProgram) -> tuple[StepProgram, dict[Input, torch.Tensor]]:
    """The program over copies of its state, which graphs share as before; the copies."""
    copies: dict[Input, torch.Tensor] = {}
    graphs = {}
    for name, step in program.graphs.items():
        for spec in step.inputs:
            if spec.tensor is not None and spec.what not in copies:
                copies[spec.what] = spec.tensor.detach().clone()
        inputs = [replace(spec, tensor=copies.get(spec.what)) for spec in step.inputs]
        graphs[name] = replace(step, inputs=inputs)
        graphs[name].module.recompile()  # which the passes' runner does for the graphs that it was given
    return StepProgram(graphs, program.schedule), copies


@contextlib.contextmanager
def counts_as_they_are(traced: Traced) -> Iterator[None]:
    """Inside, steps may count in the optimizer, which other tests share."""
    places = [place for host in traced.hosts for places in host.writes.values() for place in places]
    before = [copy.deepcopy(holder()[key]) for holder, key in places]
    try:
        yield
    finally:
        for (holder, key), value in zip(places, before, strict=True):
            if isinstance(value, torch.Tensor):
                holder()[key].copy_(value)
            else:
                holder()[key] = value


def captured_records(name: str, step: StepGraph | StepProgram, steps: int = STEPS) -> list[Record]:
    """What a rewritten copy of the case's captured program (or of its main graph) gives after each step."""
    _, traced, optimizer, batches = prepared(name)
    if isinstance(step, StepGraph):
        main = traced.program.schedule[0].graph
        step = StepProgram(traced.program.graphs | {main: step}, traced.program.schedule)
    program, state = rebound(step)
    names = {what.path: tensor for what, tensor in state.items() if isinstance(what, ModelTensor)}
    for what, tensor in state.items():
        if isinstance(what, GroupValue):
            tensor.fill_(optimizer.param_groups[what.group]["lr"])
    run = ProgramRunner(program, Session(), Memory())
    landing = [slot.name for slot, _ in traced.landing]
    records = []
    torch.manual_seed(2)
    with counts_as_they_are(traced):
        for i in range(steps):
            for host in traced.hosts:
                host.begin()
            for spec in (spec for graph in traced.program.graphs.values() for spec in graph.inputs):
                if isinstance(spec.what, HostValue):
                    state[spec.what].copy_(spec.tensor)
            results = run(list(batches[i % len(batches)].values()))
            for host in traced.hosts:
                host.end(iter(results.made), skipped=False)
            grads = dict(zip(landing, results.gradients, strict=True))
            record = {"loss": results.loss.clone()} | {key: value.clone() for key, value in results.metrics.items()}
            record |= {f"grad {key}": grad.clone() for key, grad in grads.items()}
            if optimizer is None:
                with torch.no_grad():
                    for key, grad in grads.items():
                        names[key].add_(grad, alpha=-0.05)
            record |= {n: t.clone() for n, t in names.items()}
            record["generator"] = torch.get_rng_state()
            records.append(record)
    return records


def compare(expected: list[Record], actual: list[Record]) -> None:
    """Raise ``AssertionError`` naming the first tensor that differs in any bit."""
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype, f"step {i}: {key} is {b[key].dtype}"
            assert torch.equal(a[key], b[key]), f"step {i}: {key} differs from eager"


def check_bitwise(name: str, passes: str | Iterable, steps: int = STEPS) -> StepGraph:
    """Run ``passes`` on a case and compare ``steps`` steps with eager, bit for bit; the rewritten main graph."""
    expected, traced, _, _ = prepared(name)
    passes = passes if isinstance(passes, str) else list(passes)
    program = StepProgram({k: copied(g) for k, g in traced.program.graphs.items()}, traced.program.schedule)
    for graph in program.graphs.values():
        run_passes(graph, passes)
    compare(expected[:steps], captured_records(name, program, steps))
    return program.main


def called(step: Any) -> list[str]:
    """What a captured step calls, in order: runs of compiled pieces, and operators by name; views left out."""
    nodes = [n for n in step.graph.executable.graph.nodes if n.op in ("call_module", "call_function")]
    nodes = [n for n in nodes if n.op == "call_module" or not (n.target is operator.getitem or is_view(n))]
    names = ("compiled" if n.op == "call_module" else str(n.target) for n in nodes)
    return [name for name, _ in itertools.groupby(names)]


class Toolbox:
    """What tests use of this file."""

    CASES, TINY, Case, Tower, Writes = CASES, TINY, Case, Tower, Writes
    prepared, copied, check_bitwise = staticmethod(prepared), staticmethod(copied), staticmethod(check_bitwise)
    captured_records, compare = staticmethod(captured_records), staticmethod(compare)
    tokens, vectors, mse, llama = staticmethod(tokens), staticmethod(vectors), staticmethod(mse), staticmethod(llama)
    hugging_face, hugging_face_loss = staticmethod(hugging_face), staticmethod(hugging_face_loss)
    autocast_loss, called = staticmethod(autocast_loss), staticmethod(called)
    adamw, fused_adamw, next_token_loss = staticmethod(adamw), staticmethod(fused_adamw), staticmethod(next_token_loss)

    @staticmethod
    def trace(model: nn.Module, loss_fn: Callable, batch: Any, optimizer: Any = None, **options: Any) -> StepGraph:
        """The captured step alone."""
        return trace_step(model, loss_fn, batch, optimizer, **options).step

    @staticmethod
    def by_hand(function: Callable, *inputs: torch.Tensor, phase: str = "forward") -> StepGraph:
        """A function of tensors as a step graph, all of it in one phase."""
        module = make_fx(function, tracing_mode="fake")(*inputs)
        for node in module.graph.nodes:
            if node.op == "call_function":
                set_provenance(node, Provenance("", phase, "test.py:1"))
        results = module.graph.output_node().all_input_nodes
        inputs = [InputSpec(Parameter(str(i))) for i in range(len(inputs))]
        return StepGraph(module, inputs, [Metric(str(i)) for i in range(len(results))])

    @staticmethod
    def check_same(step: StepGraph, inputs: Sequence[torch.Tensor], passes: Iterable) -> list[PassReport]:
        """Run ``passes`` and check that the graph gives, and writes into its inputs, the same bits as before."""
        before, after = ([t.clone() for t in inputs] for _ in range(2))
        expected = [t.clone() for t in step.module(*before)]
        reports = run_passes(step, passes)
        actual = step.module(*after)
        for a, b in zip([*expected, *before], [*actual, *after], strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(a, b)
        return reports

    @staticmethod
    def targets(step: StepGraph, *phases: str) -> list:
        """Targets of the step's nodes, in order."""
        return [node.target for node in step.nodes(*phases)]


@pytest.fixture(name="tools", scope="session")
def tools_fixture() -> type[Toolbox]:
    return Toolbox


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", list(CASES))
