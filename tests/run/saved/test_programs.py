"""A step that is loaded does bit for bit what the one did that was saved, for programs of one graph and of several."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.passes import PassReport
from tests.distributed.ranks import TINY, whole_model


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def silent(model, batch):
    """A loss that no text stands for: it holds a generator."""
    return loss_fn(model, batch) if _HELD.gi_frame is not None else None


_HELD = (x for x in ())


def a_batch(seed=0):
    torch.manual_seed(seed)
    return {key: torch.randint(0, TINY.vocab_size, (4, 16)) for key in ("tokens", "targets")}


def start(saved, loss_fn=loss_fn, optimizer=torch.optim.AdamW, passes="exact", **options):
    """(a step of a new model, that model)."""
    model = whole_model()
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
    "accumulated gradients": {"accumulate": 2, "optimizer": None},
    "guarded": {"on_nonfinite": "skip"},
    "guarded and accumulated": {"on_nonfinite": "skip", "accumulate": 2},
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_second_start_loads_and_does_the_same(kind, tmp_path):
    options = PROGRAMS[kind]
    plain = run(*start(None, **options))
    first, model = start(tmp_path, **options)
    assert first.saved.loaded is None and first.saved.kept and not first.saved.notes
    assert same(plain, run(first, model))
    second, model = start(tmp_path, **options)
    assert second.saved.loaded == "start" and not second.saved.notes
    assert list(second.graphs) == list(first.graphs) and second.program.text() == first.program.text()
    assert [_did(r) for r in second.report] == [_did(r) for r in first.report]
    assert same(plain, run(second, model))


def _did(report: PassReport) -> tuple:
    return report.name, report.graph, report.matched, report.changed, report.summary, report.skipped, report.notes


@pytest.mark.parametrize("kind", ["plain", "guarded and accumulated"])
def test_a_step_with_an_unknown_part_is_captured_and_its_passes_are_loaded(kind, tmp_path):
    options = PROGRAMS[kind] | {"loss_fn": silent}
    first, _ = start(tmp_path, **options)
    second, model = start(tmp_path, **options)
    assert second.saved.loaded == "graph"
    assert second.saved.notes == [
        f"the step is captured at every start, as nothing stands for {__name__}._HELD, a builtins.generator"
    ]
    assert same(run(*start(None, **options)), run(second, model))
    assert first.saved.kept == second.saved.kept


def test_other_forms_of_a_step_are_loaded_too(tmp_path):
    def shorter(step):
        return step({key: value[:, :8] for key, value in a_batch().items()})

    first, _ = start(tmp_path)
    step, _ = start(tmp_path)
    assert torch.equal(shorter(first), shorter(step)) and step.saved.loaded == "start"
