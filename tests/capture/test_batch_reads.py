"""What Python reads of the batch's integers belongs to the form of the step, and is compared at each call."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph import CaptureError
from stepgraph.graph.partition import needs_host
from tests.capture.conftest import eager_step


class Looks(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.linear, self.look = nn.Linear(6, 6), look

    def forward(self, batch):
        return self.look(self.linear(batch["x"]), batch)


def loss_fn(model, batch):
    return model(batch).square().sum()


#: (counts, mask) of each batch of six rows.
VALUES = [
    ([1, 2, 3], [1, 0, 1, 0, 0, 0]),
    ([1, 2, 3], [0, 1, 1, 0, 0, 0]),
    ([2, 2, 2], [1, 1, 1, 1, 1, 1]),
    ([3, 2, 1], [1, 0, 1, 0, 0, 0]),
    ([1, 2, 3], [1, 0, 1, 0, 0, 0]),
]


def batches():
    torch.manual_seed(0)
    return [{"x": torch.randn(6, 6), "n": torch.tensor(n), "m": torch.tensor(m) == 1} for n, m in VALUES]


def written(y, b):
    """Values of the batch that are written into literals, by views, and read before and after."""
    places = torch.zeros(2, 6, dtype=torch.int64)
    row, twice = places[1], torch.zeros(2, 6, dtype=torch.int64)
    before = places.sum()
    row[b["m"]] = 3
    row[:3] += b["n"]
    between = places.sum()
    row.mul_(2)
    twice += 1
    return y * places.max().item() + before.item() - between.item() + row[1:].sum().item() * twice.sum().item()


def starts(y, b, first=(0,)):
    """Where each part begins, written into memory that holds anything."""
    found = torch.empty(3, dtype=torch.int64)
    found[1:] = b["n"].cumsum(0)[:-1]
    found[: len(first)] = torch.tensor(first, dtype=torch.int64)
    return torch.cat([y[at:] * (i + 1) for i, at in enumerate(found)])


#: How Python reads the batch, and how many forms the batches have.
LOOKS = {
    "item": (lambda y, b: y * b["n"].sum().item(), 1),
    "half": (lambda y, b: y * int(torch.floor(b["n"].sum() / 2)), 1),
    "tolist": (lambda y, b: torch.cat([p * (i + 1) for i, p in enumerate(y.split(b["n"].tolist()))]), 3),
    "loop": (lambda y, b: sum(y[i : i + 1] * n for i, n in enumerate(b["n"]) if n > 1), 3),
    "size": (lambda y, b: y[: b["n"].max()], 2),
    "branch": (lambda y, b: y if b["m"].all() else y * 3, 2),
    "rows": (lambda y, b: y[b["m"]] * 2, 2),
    "elements": (lambda y, b: y[b["m"][:, None].expand_as(y)], 2),
    "masked_select": (lambda y, b: y.masked_select(b["m"][:, None]), 2),
    "nonzero": (lambda y, b: y[b["m"].nonzero().squeeze(1)], 2),
    "where": (lambda y, b: y[torch.where(b["m"])], 2),
    "put": (lambda y, b: torch.zeros_like(y).index_put((b["m"],), y[b["m"]] * 2), 2),
    "repeat_interleave": (lambda y, b: torch.repeat_interleave(y[:3], b["n"], dim=0), 1),
    "unique": (lambda y, b: y * torch.unique(b["n"]).sum(), 2),
    "unique_consecutive": (lambda y, b: y * torch.unique_consecutive(b["n"], return_counts=True)[1].max(), 3),
    "bincount": (lambda y, b: y[:, :2] * torch.bincount(b["n"], minlength=9)[:2], 2),
    "one_hot": (lambda y, b: y[:3] * F.one_hot(b["n"])[:, 1:2], 2),
    "written": (written, 4),
    "written whole": (starts, 3),
    "padding": (lambda y, b: y[(b["x"] * b["m"][:, None] == 0).sum(-1) != 6], 2),
    "infinite": (lambda y, b: y * 2 if b["x"].isinf().any() else y, 1),
    "list of tensors": (lambda y, b: y * torch.tensor([b["n"].max(), b["n"].min()]).sum(), 2),
}


@pytest.mark.parametrize("look", LOOKS)
def test_values_of_the_batch(look):
    read, forms = LOOKS[look]
    model = Looks(read)
    twin = copy.deepcopy(model)
    ours, eager = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin, model))
    step = stepgraph.capture(twin, loss_fn, batches()[0], ours, max_grad_norm=1.0, passes="exact")
    for batch in batches():
        assert torch.equal(step(batch), eager_step(model, loss_fn, batch, eager, 1.0, 1)[0])
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    assert len(step._forms) == forms
    assert not [node for node in step.graph.graph.nodes if needs_host(node, gpu="cpu")]  # on a GPU, one CUDA graph


def test_values_of_another_device_are_copied_outside_the_trace(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # a real operator, as a copy from a GPU is
    step = stepgraph.capture(Looks(LOOKS["size"][0]), loss_fn, batches()[0], passes="exact")
    assert step.verify(batches()[1]).bitwise


def test_only_what_is_read_is_compared():
    model = Looks(lambda y, b: y * torch.ones_like(b["n"]).sum().item())
    step = stepgraph.capture(model, loss_fn, batches()[0], passes="exact")
    for batch in batches():
        step(batch)
    assert len(step._forms) == 1 and not len(step._forms.latest.traced.batch_reads)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@pytest.mark.parametrize("numbers", [(7, 8, 9, 0), (float("nan"), -0.0, 1)])
def test_the_truth_of_a_number_is_whether_it_is_zero(numbers, dtype, replay):
    """A loss divides by ``num_items_in_batch or 1``: each count that is none is the same form."""
    if dtype == torch.long and numbers[-1]:
        numbers = (1, 0, 2)
    given = [{"x": torch.randn(4, 6), "n": torch.tensor(n, dtype=dtype)} for n in numbers]
    model = Looks(lambda y, b: (y if not b["n"] else y * 2) / (b["n"] or 1))
    step = stepgraph.capture(model, loss_fn, given[0], passes="exact", replay=replay)
    assert all(step.verify(batch).bitwise for batch in given)
    assert len(step._forms) == 2


REFUSED = {
    "floating point": lambda y, b: y * b["x"].sum().item(),
    "a number": lambda y, b: y * b["x"][0, 0].item(),
    "a conversion": lambda y, b: y * b["x"].long().max().item(),
    "of a sum": lambda y, b: y if b["x"].sum() > 0 else y * 2,
    "parameter": lambda y, b: y[y > 0],
    "written": lambda y, b: y * b["n"].mul_(2).sum().item() * b["n"].view(3, 1).sum().item() * b["x"].max().item(),
    "not written whole": lambda y, b: starts(y, b, ()),
    "batch and parameter": lambda y, b: y * (b["n"] + y.argmax()).sum().item(),
}


@pytest.mark.parametrize("look", REFUSED)
def test_other_values_stay_refused(look):
    with pytest.raises(CaptureError, match="needs a tensor's value") as caught:
        stepgraph.capture(Looks(REFUSED[look]), loss_fn, batches()[0], passes="exact")
    assert "\n" not in str(caught.value)


def test_microbatches_share_what_is_read():
    model = Looks(lambda y, b: y[b["m"]])
    alike = {"x": torch.randn(6, 6), "m": torch.tensor([1, 0, 1, 1, 1, 0]) == 1}
    twin = copy.deepcopy(model)
    ours, eager = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin, model))
    step = stepgraph.capture(twin, loss_fn, alike, ours, max_grad_norm=1.0, accumulate=2, passes="exact")
    assert torch.equal(step(alike), eager_step(model, loss_fn, alike, eager, 1.0, 2)[0])
    with pytest.raises(CaptureError, match="differ between its 2 microbatches"):
        step(alike | {"m": torch.tensor([1, 0, 1, 1, 0, 0]) == 1})


class Strided(nn.Module):
    """Reads an integer buffer, and with ``counts`` adds to it afterwards, in place or by another tensor."""

    def __init__(self, counts=""):
        super().__init__()
        self.linear, self.counts = nn.Linear(6, 6), counts
        self.register_buffer("stride", torch.tensor(2))

    def forward(self, batch):
        y = self.linear(batch["x"])[:: int(torch.ceil(self.stride / 1))]
        if self.counts == "in place":
            self.stride.add_(1)
        elif self.counts:
            self.stride = self.stride + 1
        return y


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_integer_buffer_is_compared_too(accumulate):
    model, batch = Strided(), batches()[0]
    twin = copy.deepcopy(model)
    ours, eager = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin, model))
    x = {"x": batch["x"]}
    step = stepgraph.capture(twin, loss_fn, x, ours, max_grad_norm=1.0, accumulate=accumulate, passes="exact")
    for stride in (2, 3, 2, 1):
        model.stride.fill_(stride)
        twin.stride.fill_(stride)
        assert torch.equal(step(x), eager_step(model, loss_fn, x, eager, 1.0, accumulate)[0])
    assert len(step._forms) == 3


@pytest.mark.parametrize("counts", ["in place", "another"])
def test_an_integer_buffer_that_the_step_changes_is_refused(counts):
    with pytest.raises(CaptureError, match="forward reads stride in Python and changes it"):
        stepgraph.capture(Strided(counts), loss_fn, {"x": torch.randn(6, 6)}, passes="exact")


def targets(*lengths):
    rows = torch.full((len(lengths), 6), -100)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(1, 12, (length,))
    return rows


@pytest.mark.parametrize("lengths", [None, (400, 300)])
def test_ctc_of_transformers(check_training, lengths):
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=[8, 8], conv_kernel=[8, 4], conv_stride=[4, 4], num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, pad_token_id=0,
    )  # fmt: skip
    found = [
        {"input_values": torch.randn(2, 400), "labels": targets(*of)} for of in ((3, 4), (4, 3), (2, 6), (3, 4))
    ]  # the second has the first one's form
    if lengths is not None:
        mask = (torch.arange(400) < torch.tensor(lengths)[:, None]).long()
        found = [batch | {"attention_mask": mask.roll(i, 0)} for i, batch in enumerate(found)]
    check_training(
        transformers.Wav2Vec2ForCTC(config),
        lambda m, b: m(**b).loss,
        found,
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        max_grad_norm=1.0,
    )


def test_ctc_with_lengths_that_are_numbers():
    model, batch = torch.nn.Linear(6, 6), {"x": torch.randn(5, 2, 6), "targets": torch.tensor([[1, 2, 3], [4, 5, 0]])}

    def ctc(m, b):
        return F.ctc_loss(m(b["x"]).log_softmax(-1), b["targets"], (5, 4), target_lengths=[3, 2], zero_infinity=True)

    step = stepgraph.capture(model, ctc, batch, passes="exact")
    (node,) = step.graph.graph.find_nodes(op="call_function", target=torch.ops.stepgraph.ctc_loss.default)
    assert needs_host(node, "cpu") and step.verify(batch).bitwise  # a GPU's kernel waits for the lengths


def qwen2_vl():
    transformers = pytest.importorskip("transformers")
    text = dict(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    )  # fmt: skip
    vision = dict(
        depth=1, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=3, video_token_id=4, vision_start_token_id=5,
        vision_end_token_id=6,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def pictures(*grids):
    """A sequence for each image of a grid (time, height, width) of patches."""
    rows = [torch.cat([torch.full((t * h * w // 4,), 3), torch.randint(10, 60, (14,))])[:14] for t, h, w in grids]
    ids = torch.stack(rows)
    patches = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 3, -100),
        "mm_token_type_ids": (ids == 3).int(),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor(grids),
    }


def with_positions(model, batch):
    given = {name: batch[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    return batch | {"position_ids": model.model.get_rope_index(**given)[0]}


def test_grids_of_qwen2_vl(check_training):
    model = qwen2_vl()
    grids = [((1, 4, 4), (1, 4, 4)), ((1, 2, 8), (1, 4, 4))]  # the same shapes
    found = [with_positions(model, pictures(*of)) for of in grids]
    check_training(model, lambda m, b: m(**b).loss, found, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))


def test_positions_of_qwen2_vl_and_what_it_keeps_of_them(check_training):
    """Without positions in the batch the model makes them by writes in place, and keeps their offsets."""
    model = qwen2_vl()
    grids = [((1, 4, 4), (1, 4, 4)), ((1, 2, 8), (1, 4, 4)), ((1, 4, 4), (1, 4, 4))]
    found = [pictures(*of) for of in grids]
    check_training(model, lambda m, b: m(**b).loss, found, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))


class Remembers(nn.Module):
    """Keeps what ``made(batch)`` gives, and reads what it kept before."""

    def __init__(self, made, reads):
        super().__init__()
        self.linear, self.made, self.reads, self.kept = nn.Linear(6, 6), made, reads, None

    def forward(self, batch):
        before, self.kept = self.kept, self.made(batch)
        return self.linear(batch["x"]) * (before.sum() if self.reads and before is not None else 1)


def test_a_tensor_that_forward_keeps_and_never_reads():
    step = stepgraph.capture(model := Remembers(lambda b: b["n"] * 2, False), loss_fn, batches()[0], passes="exact")
    assert all(step.verify(batch).bitwise for batch in batches()) and model.kept is None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda b: b["n"] * 2, "its next call differs"),
        (lambda b: b["x"] * 2, "tensors of the step in model.kept"),
    ],
)
def test_a_tensor_that_forward_keeps_and_reads_is_refused(made, message):
    with pytest.raises(CaptureError, match=message):
        stepgraph.capture(Remembers(made, True), loss_fn, batches()[0], passes="exact")


@pytest.mark.parametrize(("bounds", "waits"), [((0, 3), False), ((), True), ((2, 2), True)])
def test_a_histogram_waits_only_to_find_its_bounds(bounds, waits):
    graph = make_fx(lambda x: torch.histc(x, 4, *bounds))(torch.rand(8)).graph
    assert [needs_host(node, gpu="cpu") for node in graph.nodes if "histc" in node.name] == [
        "its kernels read values on the host" if waits else None
    ]
