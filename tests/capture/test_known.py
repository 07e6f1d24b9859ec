"""Python may look at values that follow from literals while a step is traced, and at no others."""

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError
from stepgraph.capture import known

transformers = pytest.importorskip("transformers")


class Looks(nn.Module):
    """Scales its output by a number that ``look(x)`` returns."""

    def __init__(self, look):
        super().__init__()
        self.linear, self.look = nn.Linear(6, 6), look

    def forward(self, x):
        return self.linear(x) * self.look(x)


def loss_fn(model, x):
    return model(x).square().sum()


def positions(x):
    return torch.arange(x.shape[-1], device=x.device)


def a_branch(x):
    steps = torch.diff(positions(x)[None], prepend=positions(x)[None, :1] - 1)
    return 2.0 if (steps != 1).cumsum(-1)[:, -1].eq(0).all() else 3.0


def an_item(x):
    return positions(x).view(2, 3)[1].float().mean().item()


def a_literal(x):
    return (torch.tensor([1.0, 2.0, 4.0], device=x.device) * positions(x)[1:4]).max().item()


def a_list(x):
    return float(sum(torch.arange(100, device=x.device).tolist()))


def a_shape(x):
    return (torch.ones_like(x, dtype=torch.int64).cumsum(-1)[0, -1] + x.new_full((2,), 3.0)[1]).item()


def before_it_is_written(x):
    many = torch.zeros(6, device=x.device)
    later = (many + 1).sum()
    value = later.item()
    many.copy_(x[0])
    return 2 * value


def equality(x):
    return 2.0 if torch.equal(positions(x), torch.zeros_like(positions(x))) else 5.0


def on_another_device(x):
    return torch.ones(3, device=x.device).to("cpu", torch.int64).sum().item()


@pytest.mark.parametrize(
    ("look", "value"),
    [
        (a_branch, 2.0),
        (an_item, 4.0),
        (a_literal, 12.0),
        (a_list, 4950.0),
        (a_shape, 9.0),
        (before_it_is_written, 12.0),
        (equality, 5.0),
        (on_another_device, 3),
    ],
)
def test_values_that_follow_from_literals(look, value):
    model, x = Looks(look), torch.randn(4, 6)
    assert look(x) == value
    step = stepgraph.capture(model, loss_fn, x, passes=[])
    expected = loss_fn(model, x)
    expected.backward()
    wanted = model.linear.weight.grad.clone()
    model.zero_grad()
    assert torch.equal(step(x), expected)
    assert torch.equal(model.linear.weight.grad, wanted)


def of_the_batch(x):
    return 2.0 if x.sum() > 0 else 3.0


def of_chance(x):
    return torch.rand(3).sum().item()


def of_chance_and_literals(x):
    return torch.bernoulli(positions(x) / 8).sum().item()


def of_nothing_written(x):
    return torch.empty(3).sum().item()


def of_a_written_literal(x):
    mask = torch.zeros(6)
    mask.copy_(x[0])
    return mask.sum().item()


def of_a_literal_written_by_a_view(x):
    mask = torch.zeros(3, 6)
    mask[1, 2:] = x[0, 2:]
    return 2.0 if mask.any() else 3.0


def of_a_view_of_a_written_literal(x):
    mask = torch.zeros(3, 6)
    row = mask.view(-1)[6:]
    mask.add_(x[0])
    return row.sum().item()


def of_a_literal_written_in_a_list(x):
    many = [torch.zeros(6), torch.zeros(6)]
    torch._foreach_add_(many, [x[0], x[1]])
    return many[1].sum().item()


def of_a_literal_written_before_it_is_read(x):
    mask = torch.zeros(6)
    row = mask[2:]
    mask.copy_(x[0])
    return (row + 1).sum().item()


HELD, SHARED = torch.tensor([1.0, 2.0, 3.0]), np.ones(3, "float32")
ELEMENT = HELD[1]


def a_sum(x):
    return 2.0 if HELD.sum() > 4 else 3.0


def a_mask(x):
    return float(len(x[0, :3][HELD > 2]) + len(HELD.nonzero()))


def the_mask_itself(x):
    return float(len(x[0, :3][HELD.bool()])) if HELD.bool().any() else 4.0


def a_filled_mask(x):
    return float((torch.zeros(3).masked_fill_(HELD > 2, 1.0) == 1).sum())


def an_array(x):
    return torch.from_numpy(SHARED).sum().item()


def lists_of_elements(x):
    one, two, three = HELD
    made = torch.tensor([one, 1.0]), torch.as_tensor([[two], [2]]), torch.asarray((three,)), x.new_tensor([HELD.sum()])
    return sum(tensor.sum() for tensor in made)


def a_buffer(model, x):
    return float((model.held * 2).max()) + len(x[0, :3][model.held > 2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("look", [a_sum, a_mask, the_mask_itself, a_filled_mask, an_array, lists_of_elements, a_buffer])
def test_values_of_buffers_and_of_tensors_from_outside_are_compared(look, accumulate):
    """Each call computes what Python has read; another value is captured."""
    model = Looks(look)
    model.register_buffer("held", HELD.clone())
    model.look = (lambda x: a_buffer(model, x)) if look is a_buffer else look
    step = stepgraph.capture(model, loss_fn, torch.randn(4, 6), passes="exact", accumulate=accumulate)
    forms = []
    for values in ([1.0, 2.0, 3.0], [1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]):
        for held in (HELD, model.held.data):
            held.copy_(torch.tensor(values))
        SHARED[:] = values
        x = torch.randn(4, 6)
        assert step.verify(x).bitwise
        step(x)
        forms.append(step.program)
    assert forms[0] is forms[3] and forms[0] is not forms[2]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: float(HELD.numpy()[0] + np.asarray(HELD)[1]),
        lambda x: float(np.from_dlpack(HELD)[1]),
        lambda x: float(str(HELD)[8]),
        lambda x: float(repr(ELEMENT)[7]),
    ],
)
def test_memory_of_a_tensor_from_outside_that_is_read_is_compared(look):
    HELD.copy_(torch.tensor([1.0, 2.0, 3.0]))
    step = stepgraph.capture(Looks(look), loss_fn, torch.randn(4, 6), passes="exact")
    assert step.verify(torch.randn(4, 6)).bitwise
    HELD.copy_(torch.tensor([2.0, 4.0, 3.0]))
    with pytest.warns(UserWarning, match="whose value Python reads"):
        assert step.verify(torch.randn(4, 6)).bitwise


class Masked(nn.Module):
    """PyTorch's tutorial of nn.TransformerEncoder: its layers ask whether the mask is causal."""

    def __init__(self, mask, where):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder, self.where, self.mask = nn.TransformerEncoder(layer, 2), where, None
        if where == "buffer":
            self.register_buffer("table", mask)
        elif where == "parameter":
            self.table = nn.Parameter(mask, requires_grad=False)
        elif where == "attribute":
            self.table = mask

    def forward(self, x, mask):
        if self.where == "made once" and self.mask is None:
            self.mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        masks = {"made once": self.mask, "batch": mask}
        mask = masks[self.where] if self.where in masks else self.table[: x.shape[1], : x.shape[1]]
        return self.encoder(x, mask=mask)


@pytest.mark.parametrize("where", ["buffer", "parameter", "attribute", "batch", "made once"])
@pytest.mark.parametrize("kind", ["float", "bool", "not causal"])
def test_the_causal_mask_of_an_encoder(where, kind):
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    mask = mask.isinf() if kind == "bool" else mask.T.contiguous() if kind == "not causal" else mask
    batch = {"x": torch.randn(3, 6, 8), "mask": mask}
    loss_fn = lambda m, b: m(b["x"], b["mask"]).square().mean()  # noqa: E731
    step = stepgraph.capture(Masked(mask, where), loss_fn, batch, passes="exact")
    assert step.verify(batch).bitwise
    causal = all(node.args[4:5] == (True,) for node in attention(step))
    assert causal == (kind != "not causal" or where == "made once")


def of_no_device(x):
    return torch.arange(6, device="meta").sum().item()


def of_too_many(x):
    return torch.zeros(known.LARGEST + 1).sum().item()


@pytest.mark.parametrize(
    "look",
    [
        *(of_the_batch, of_chance, of_chance_and_literals, of_nothing_written, of_a_written_literal),
        *(of_a_literal_written_by_a_view, of_a_view_of_a_written_literal, of_a_literal_written_in_a_list, of_too_many),
        *(of_a_literal_written_before_it_is_read, of_no_device),
    ],
)
def test_other_values_are_not_known(look):
    with pytest.raises(CaptureError, match=r"needs a tensor's value while the step is traced without values"):
        stepgraph.capture(Looks(look), loss_fn, torch.randn(4, 6))


def test_a_weight_that_the_model_shows_otherwise_is_not_known():
    model = Looks(lambda x: None)
    weight = model.linear.weight.detach()
    model.look = lambda x: weight.sum().item()
    with pytest.raises(CaptureError, match="needs a tensor's value"):
        stepgraph.capture(model, loss_fn, torch.randn(4, 6))


def test_a_mask_of_ones_made_beside_the_model_is_left_out_as_in_eager():
    ids = torch.randint(53, (4, 12))

    def loss(model, ids):
        return model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss

    step = stepgraph.capture(llama(), loss, ids, passes=[])
    assert all(node.args[4] is True and "attn_mask" not in node.kwargs for node in attention(step))


def llama():
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=53, intermediate_size=48,
        num_hidden_layers=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def attention(step):
    return [n for n in step.graph.graph.nodes if "flash_attention_for_cpu.default" in str(n.target)]


def test_hugging_face_attends_as_in_eager():
    ids = torch.randint(53, (4, 12))
    step = stepgraph.capture(llama(), lambda model, ids: model(ids, labels=ids).loss, ids, passes=[])
    assert len(attention(step)) == 2
    for node in attention(step):
        assert node.args[4] is True and "attn_mask" not in node.kwargs  # causal, without a mask
        assert node.args[1].meta["val"].shape[1] == 2  # keys are not repeated
    assert transformers.utils.import_utils.is_fake_tensor.__module__ == "transformers.utils.import_utils"


def test_a_mask_of_the_batch_stays_one_whatever_the_first_batch_holds():
    model = llama()

    def masked_loss(model, batch):
        return model(**batch, use_cache=False).logits[batch["attention_mask"] == 1].square().mean()

    def masked_sum(model, batch):
        logits = model(**batch, use_cache=False).logits
        return (logits * batch["attention_mask"][..., None]).square().mean()

    ids = torch.randint(53, (4, 12))
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded = {"input_ids": ids, "attention_mask": (torch.arange(12) >= torch.tensor([[0], [3], [7], [0]])).long()}
    passes = stepgraph.StepOptions(inductor="off")
    selected = stepgraph.capture(model, masked_loss, whole, passes=passes)
    for batch in (whole, padded):  # two forms: they select as many rows as the mask has ones
        torch.testing.assert_close(selected(batch), masked_loss(model, batch).detach())
    step = stepgraph.capture(model, masked_sum, whole, passes=passes)
    for batch in (whole, padded):
        torch.testing.assert_close(step(batch), masked_sum(model, batch).detach())
    assert all("attn_mask" in node.kwargs for node in attention(step))


def test_a_draw_that_is_above_zero():
    """As peft's LoHa asks with a dropout of 0: one number of 16 million would decide otherwise."""

    def loss_fn(model, x):
        return model(x).square().mean() if torch.rand(1) > 0.0 else x.sum()

    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(stepgraph.CaptureError, match=r"peft's LoHa .* need passes other than exact"):
        stepgraph.capture(model, loss_fn, x, passes="exact")
    step = stepgraph.capture(model, loss_fn, x, passes=stepgraph.StepOptions(inductor="off"))
    state = torch.get_rng_state()
    expected, drawn = loss_fn(model, x), torch.get_rng_state()
    torch.set_rng_state(state)
    torch.testing.assert_close(step(x), expected.detach())
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("bound", [0.0, 1.0, 0.5])
def test_a_draw_whose_number_cannot_change_the_decision(bound):
    """As LayerDrop's with 0: the number is drawn, as in eager."""

    def loss_fn(model, x):
        y = model(x)
        return y.square().mean() if torch.rand([]) < bound else (y + torch.rand(())).square().mean()

    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    if bound == 0.5:
        with pytest.raises(stepgraph.CaptureError, match="needs a tensor's value"):
            stepgraph.capture(model, loss_fn, x, passes="exact")
        return
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    state = torch.get_rng_state()
    expected = [loss_fn(model, x).detach() for _ in range(2)]
    torch.set_rng_state(state)
    assert all(map(torch.equal, [step(x), step(x)], expected))
