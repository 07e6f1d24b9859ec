"""A step that is loaded does bit for bit what the one did that was saved, for programs of one graph and of several."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.passes import PassReport
from stepgraph.run.saved import store
from tests.distributed.ranks import TINY, whole_model


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def a_batch(seed=0):
    torch.manual_seed(seed)
    return {key: torch.randint(0, TINY.vocab_size, (4, 16)) for key in ("tokens", "targets")}


class Small(nn.Module):
    """A model that is captured in no time, for what does not depend on the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(TINY.vocab_size, 8), nn.Linear(8, TINY.vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).tanh())


def start(saved, loss_fn=loss_fn, optimizer=torch.optim.AdamW, passes="exact", model=whole_model, **options):
    """(a step of a new model, that model)."""
    model = model()
    given = optimizer and optimizer(model.parameters(), lr=1e-2)
    step = stepgraph.capture(model, loss_fn, a_batch(), given, passes=passes, saved=saved, **options)
    return step, model


def run(step, model):
    """Everything that three steps leave behind."""
    found = []
    for seed in range(3):
        found += [step(a_batch(seed)), *step.metrics.values()]
    return found + [t.detach() for p in model.parameters() for t in (p, p.grad) if t is not None]


def same(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


PROGRAMS = {
    "plain": {"max_grad_norm": 0.5},
    "gradients": {"optimizer": None},
    "sgd": {"optimizer": torch.optim.SGD},
    "accumulated": {"accumulate": 2, "max_grad_norm": 0.5},
    "accumulated gradients": {"accumulate": 2, "optimizer": None, "model": Small},
    "guarded": {"on_nonfinite": "skip"},
    "guarded and accumulated": {"on_nonfinite": "skip", "accumulate": 2, "model": Small},
}


#: Together these have all that a program can have.
_SHORT = ("plain", "accumulated gradients", "guarded and accumulated")


@pytest.mark.parametrize("kind", [k if k in _SHORT else pytest.param(k, marks=pytest.mark.long) for k in PROGRAMS])
def test_the_second_start_loads_and_does_the_same(kind, tmp_path):
    options = PROGRAMS[kind]
    plain = run(*start(None, **options))
    first, model = start(tmp_path, **options)
    assert not first.saved.loaded and first.saved.kept and not first.saved.notes
    assert same(plain, run(first, model))
    second, model = start(tmp_path, **options)
    assert second.saved.loaded and not second.saved.notes
    assert list(second.graphs) == list(first.graphs) and second.program.text() == first.program.text()
    assert [_did(r) for r in second.report] == [_did(r) for r in first.report]
    assert same(plain, run(second, model))


def _did(report: PassReport) -> tuple:
    return report.name, report.graph, report.matched, report.changed, report.summary, report.skipped, report.notes


def test_other_forms_of_a_step_are_loaded_too(tmp_path):
    def shorter(step):
        return step({key: value[:, :8] for key, value in a_batch().items()})

    first, _ = start(tmp_path, model=Small)
    step, _ = start(tmp_path, model=Small)
    assert torch.equal(shorter(first), shorter(step)) and step.saved.loaded


def test_compiled_pieces_are_loaded_without_a_compiler(tmp_path, monkeypatch):
    def steps():
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = stepgraph.capture(
            model, lambda m, x: m(x).square().mean(), torch.ones(2, 3), optimizer, passes=["inductor"], saved=tmp_path
        )
        return step, [step(torch.ones(2, 3)) for _ in range(2)] + [p.detach() for p in model.parameters()]

    first, results = steps()
    assert first.saved.kept and first.report[0].changed and not first.saved.notes
    monkeypatch.setattr("stepgraph.compat.inductor_compile", None)
    second, again = steps()
    assert second.saved.loaded and same(results, again)


def test_the_kernels_of_a_loaded_step_are_compiled_ahead(monkeypatch, tmp_path):
    """Triton's cache is not that of the machine or rank that made the step."""
    start(tmp_path, model=Small)
    asked = []

    class Ahead:
        def __init__(self, graphs):
            asked.append([node.target for graph in graphs for node in graph.nodes if node.op == "call_function"])

        def start(self):
            asked.append("started")

        def finish(self):
            return ["one kernel compiled"]

    monkeypatch.setattr("stepgraph.run.saved.store.Ahead", Ahead)
    step, _ = start(tmp_path, model=Small)
    called = [node.target for node in step.graph.graph.nodes if node.op == "call_function"]
    assert asked == [called, "started"]
    assert step.saved.loaded and step.saved.notes == ["one kernel compiled"]


def test_helpers_are_dropped_before_a_step_is_loaded(monkeypatch, tmp_path):
    did, load = [], store._Saving._program
    monkeypatch.setattr(store, "drop_helpers", lambda: did.append("drop"))
    monkeypatch.setattr(store._Saving, "_program", lambda *given: did.append("load") or load(*given))
    start(tmp_path, model=Small)
    assert not did
    start(tmp_path, model=Small)
    assert did == ["drop", "load"]
