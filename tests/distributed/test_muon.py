"""Muon over sharded matrices: bit for bit the update of one process, with the same gradients."""

import dataclasses

import pytest
import torch

import stepgraph
from stepgraph.capture.optimizer import spread
from stepgraph.graph.collectives import ALL_TO_ALL
from stepgraph.graph.provenance import role_of
from stepgraph.parallel import next_token_loss
from stepgraph.passes import get
from tests.distributed.ranks import TINY, full, make_mesh, on_ranks, own_batch, parallel_model, whole_model
from tests.distributed.test_exact import CLIP, PARTS, eager_step

#: The feed-forward's rows do not divide over ranks of fsdp, with tp or without: padded, with tp between two parts. One
#: matrix (down_proj) has no other of its form, so that zeros fill its round.
MODELS = {mesh: dataclasses.replace(TINY, ffn_dim=82 if "tp" in mesh else 81) for mesh in ("fsdp=2", "tp=2")}
MODELS |= {"fsdp=2,tp=2": MODELS["tp=2"], "hsdp=2x2": MODELS["fsdp=2"], "fsdp=4": MODELS["fsdp=2"]}


def optimizers(model, **options):
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02, **options), torch.optim.AdamW(rest, lr=0.01)]


class Whole:
    """Parameters of one process, with the gradients of a model over ranks. `torch.optim` takes it for an optimizer."""

    def __init__(self, model, config, **options):
        self.model, self.alone = model, whole_model(config)
        self.optimizers = optimizers(self.alone, **options)

    def step(self):
        for (name, param), own in zip(self.alone.named_parameters(), self.model.parameters(), strict=True):
            param.grad = full(self.model, name, own.grad).to(param.dtype).clone()
        for one in self.optimizers:
            one.step()
        self.model.load_state_dict(
            {name: p.detach().clone() for name, p in self.alone.named_parameters()}, strict=False
        )

    def zero_grad(self):
        self.model.zero_grad()


def _check(meshes, options=None):
    options = {"ns_steps": 2} | (options or {})  # few, for a short trace
    spread._BUCKET = 10_000  # several exchanges
    for text in meshes:
        mesh, config = make_mesh(text), MODELS[text]
        loss_fn, eager, captured = next_token_loss(mesh), parallel_model(mesh, config), parallel_model(mesh, config)
        expected, own = Whole(eager, config, **options), optimizers(captured, **options)
        step = stepgraph.capture(
            captured, loss_fn, own_batch(mesh, 0), own, max_grad_norm=CLIP, accumulate=PARTS, passes="exact"
        )
        for i in range(2):
            for one in (*expected.optimizers, *own):
                one.param_groups[0]["lr"] *= 0.9
            loss, norm = eager_step(eager, loss_fn, own_batch(mesh, i), expected)
            assert torch.equal(step(own_batch(mesh, i)), loss), (text, i)
            assert torch.equal(step.metrics["grad_norm"], norm), (text, i)
            for name, param in captured.named_parameters():
                assert torch.equal(full(captured, name, param), expected.alone.get_parameter(name)), (text, i, name)
        for name, param in captured.named_parameters():
            if param in own[0].state:
                buffer, state = own[0].state[param]["momentum_buffer"], expected.optimizers[0].state
                whole = state[expected.alone.get_parameter(name)]["momentum_buffer"]
                assert torch.equal(full(captured, name, buffer), whole), (text, name)
        report = step.verify(own_batch(mesh, 0))
        assert report.bitwise, f"{text}: {report}"
        nodes = list(step.graphs["update"].nodes("optimizer"))
        swaps = [n for n in nodes if n.target is ALL_TO_ALL]
        assert {role_of(n).kind for n in swaps} == {"collect", "return"} and len(swaps) > 4, text
        first = next(n for n in nodes if n.target is torch.ops.aten.mm.default)
        assert role_of(swaps[1]).kind == "collect" and swaps[1] < first, text  # travels while others are worked on


def test_the_bits_of_one_process():
    on_ranks(2, _check, ("fsdp=2",))


def _check_together(text):
    """Matrices of one exchange are orthogonalized together, to what bf16 products round of one process's updates."""
    passes = [dataclasses.replace(get(name), needs_cuda=False) for name in ("orthogonalize", "fuse_updates")]
    passes = [passes[0].with_options(reached=1e3), get("inplace_update"), passes[1]]
    mesh, config = make_mesh(text), dataclasses.replace(MODELS[text], n_layers=4)
    loss_fn, eager, captured = next_token_loss(mesh), parallel_model(mesh, config), parallel_model(mesh, config)
    expected, own = Whole(eager, config, ns_steps=2), optimizers(captured, ns_steps=2)
    start = {name: full(captured, name, p).clone() for name, p in captured.named_parameters()}
    step = stepgraph.capture(
        captured, loss_fn, own_batch(mesh, 0), own, max_grad_norm=CLIP, accumulate=PARTS, passes=passes
    )
    report = next(r for r in step.report if r.name == "orthogonalize" and r.matched)
    assert report.matched == 14 and "14 of them in 3 stacks; 12 symmetric" in report.summary, report.summary
    loss, _ = eager_step(eager, loss_fn, own_batch(mesh, 0), expected)
    assert torch.equal(step(own_batch(mesh, 0)), loss)
    for name, param in captured.named_parameters():
        whole = expected.alone.get_parameter(name)
        assert (full(captured, name, param) - whole).norm() <= 0.02 * (whole - start[name]).norm(), name


def test_matrices_of_one_exchange_together():
    on_ranks(2, _check_together, "fsdp=2")


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
def test_the_bits_of_one_process_on_more_axes(options):
    on_ranks(2, _check, ("tp=2",), options)
    on_ranks(4, _check, ("fsdp=2,tp=2", "hsdp=2x2", "fsdp=4"), options)
