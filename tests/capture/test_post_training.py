"""Steps of several models: bitwise as eager runs them, and a frozen model leaves nothing for backward."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call
from torch.nn import functional as F

import stepgraph
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.values import OptimizerState
from stepgraph.kernels.loss import token_kl, token_log_probs_and_entropies

aten = torch.ops.aten
VOCAB, WIDTH = 19, 8


class Model(nn.Module):
    """Ids (B, T) to the head's input (B, T, D)."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Two(nn.Module):
    def __init__(self, frozen=True):
        super().__init__()
        self.first, self.second = Model(0), Model(1)
        self.second.requires_grad_(not frozen)


def batch():
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCAB, (2, 4, 6), generator=generator)
    labels[:, :2] = -100
    return {"ids": ids, "labels": labels}


def log_probs(model, batch):
    logs, entropy = token_log_probs_and_entropies(model(batch["ids"]), model.head.weight, batch["labels"], parts=2)
    return logs.sum(1), entropy.mean()


def preference(two, batch):
    """DPO's loss, without no_grad: what is frozen is enough."""
    (policy, entropy), (reference, _) = log_probs(two.first, batch), log_probs(two.second, batch)
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean() - 0.01 * entropy


def distillation(two, batch):
    """KL(teacher || student) by whole logits."""
    logs, target = (model.head(model(batch["ids"])).log_softmax(-1).flatten(0, 1) for model in (two.first, two.second))
    return F.kl_div(logs, target, log_target=True, reduction="batchmean")


def reverse(two, batch):
    """KL(student || teacher) by heads in parts, which keep the teacher's last hidden state and no logits."""
    heads = (x for model in (two.first, two.second) for x in (model(batch["ids"]), model.head.weight))
    return token_kl(*heads, reverse=True, parts=3).mean()


def through(two, batch):
    """A frozen model behind the trained one: gradients pass through it, to the first alone."""
    soft = two.first.head(two.first(batch["ids"])).softmax(-1) @ two.second.table.weight
    return two.second.down(F.gelu(two.second.up(two.second.norm(soft)))).square().mean()


def adversarial(two, batch):
    """Each model's part reaches only that model."""
    made, real = two.first(batch["ids"]), F.embedding(batch["ids"], two.first.table.weight.detach())
    critic = two.second.norm(real).mean() - two.second.norm(made.detach()).square().mean()
    fixed = {name: weight.detach() for name, weight in two.second.norm.named_parameters()}
    return critic + functional_call(two.second.norm, fixed, (made,)).square().mean()


def optimizers(two, loss_fn):
    own = [torch.optim.AdamW(two.first.parameters(), lr=0.01, fused=True)]
    return own + [torch.optim.SGD(two.second.parameters(), lr=0.1)] if loss_fn is adversarial else own


LOSSES = [preference, distillation, reverse, through, adversarial]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_bitwise_as_eager(loss_fn, accumulate):
    two = Two(frozen=loss_fn is not adversarial)
    step = stepgraph.capture(
        two, loss_fn, batch(), optimizers(two, loss_fn), max_grad_norm=0.5, accumulate=accumulate, passes="exact"
    )
    before = copy.deepcopy(two.state_dict())
    first = step(batch())
    assert step.verify(batch()).bitwise and step(batch()) != first
    frozen = loss_fn is not adversarial
    assert all(torch.equal(before[f"second.{k}"], p) for k, p in two.second.named_parameters()) == frozen


def is_of(node: fx.Node, model: str) -> bool:
    found = provenance(node)
    return found is not None and found.path.split(".")[0] == model


@pytest.mark.parametrize("loss_fn", [preference, distillation])
def test_a_frozen_model_leaves_nothing_for_backward(loss_fn):
    """No node of its backward, no activation of it that backward reads, no gradient and no state of an optimizer."""
    two = Two()
    step = stepgraph.capture(two, loss_fn, batch(), optimizers(two, loss_fn), passes="exact").graph
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    frozen = [node for node in nodes if is_of(node, "second")]
    assert len(frozen) > 5 and {phase_of(node) for node in frozen} == {"forward"}
    read = {node for node in frozen for user in node.users if phase_of(user) == "backward"}
    assert not read, "what backward keeps"
    assert any(phase_of(user) == "backward" for node in nodes if is_of(node, "first") for user in node.users)
    states = {node.name for node in step.placeholders(OptimizerState)}
    assert states and not any("second" in state for state in states)


def test_a_frozen_model_that_gradients_pass_through_gets_none():
    two = Two()
    step = stepgraph.capture(two, through, batch(), optimizers(two, through), passes="exact").graph
    backward = [node for node in step.graph.nodes if is_of(node, "second") and phase_of(node) == "backward"]
    (norm,) = (node for node in backward if node.target is aten.native_layer_norm_backward.default)
    assert norm.args[-1] == [True, False, False]
    assert [node.target for node in backward].count(aten.mm.default) == 2, "down's and up's input gradients"
    assert not [node for node in backward if node.target is aten.sum.dim_IntList], "no gradient of a bias"


def test_moved_average_of_frozen_parameters():
    """``end_of_step`` may write parameters that no optimizer has."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.average = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

        def end_of_step(self):
            for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(weight.detach(), 0.25)

    model = Averaged()
    x = torch.randn(4, 3)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=0.1, fused=True)
    step = stepgraph.capture(model, lambda m, x: m.model(x).square().mean(), x, optimizer, passes="exact")
    before = model.average.weight.clone()
    step(x)
    assert torch.equal(model.average.weight, before.lerp(model.model.weight.detach(), 0.25))
    assert step.verify(x).bitwise
