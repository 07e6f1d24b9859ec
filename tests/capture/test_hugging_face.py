"""Unmodified Hugging Face models, bit for bit."""

import functools

import pytest
import torch

import stepgraph

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 53}
SMALL |= {"intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **options}))


def qwen2(**options):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**SMALL, **options}))


def gpt2(**options):
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=53, n_positions=64, **options)
    return transformers.GPT2LMHeadModel(config)


def loss_fn(model, batch):
    return model(**batch).loss


def batches(n=2, mask=False):
    result = []
    for _ in range(n):
        ids = torch.randint(53, (4, 12))
        batch = {"input_ids": ids, "labels": ids.clone()}
        if mask:
            batch["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [9], [5], [12]])).long()
            batch["labels"][batch["attention_mask"] == 0] = -100
        result.append(batch)
    return result


adamw = functools.partial(torch.optim.AdamW, lr=3e-3, fused=True)


def make_optimizer(model):
    return adamw(model.parameters())


@pytest.mark.parametrize("passes", [[], "exact"])
@pytest.mark.parametrize("make", [llama, gpt2])  # GPT-2 draws dropout
def test_families(check_training, make, passes):
    model = make().train()
    check_training(model, loss_fn, batches(), make_optimizer, max_grad_norm=1.0, passes=passes, steps=10)


def test_qwen2_in_bf16_with_master_weights(check_training):
    model = qwen2(tie_word_embeddings=True).train().bfloat16()
    check_training(
        model, loss_fn, batches(), lambda m: stepgraph.MasterAdamW(m.parameters(), lr=3e-3), max_grad_norm=1.0
    )


def test_padding_mask_and_accumulation(check_training):
    check_training(llama().train(), loss_fn, batches(mask=True), make_optimizer, accumulate=2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(check_training, use_reentrant):
    model = gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.config.use_cache = False
    check_training(model, loss_fn, batches(), make_optimizer)


def test_batch_of_a_tokenizer(check_training):
    """A BatchEncoding is a mapping, not a dict."""
    model = llama().train()
    batch = transformers.BatchEncoding(batches(1)[0])
    step = stepgraph.capture(model, loss_fn, batch, make_optimizer(model), passes="exact")
    first = step(batch)
    assert step(batch) < first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_hides_nothing_is_dropped_as_in_eager(dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    ids, ones = torch.randint(50, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    padded = ones.clone()
    padded[0, -5:] = 0
    batches = [{"input_ids": ids, "labels": ids, "attention_mask": mask} for mask in (ones, padded, ones, padded)]
    step = stepgraph.capture(model, lambda m, b: m(**b).loss, batches[0], passes="exact")
    without = stepgraph.capture(model, lambda m, b: m(**b).loss, {"input_ids": ids, "labels": ids}, passes="exact")
    assert all(step.verify(batch).bitwise for batch in batches)
    assert step(ones_batch := batches[0]) == without({k: ones_batch[k] for k in ("input_ids", "labels")})
    with pytest.warns(UserWarning, match="'attention_mask'] hides nothing in one microbatch") as told:
        stepgraph.capture(model, lambda m, b: m(**b).loss, batches[1], accumulate=2, passes="exact")
    assert {one.filename for one in told} == {__file__} and "a mask of shape" not in str([*map(str, told)])


def test_a_mask_that_the_loss_makes_is_dropped_as_in_eager():
    def of_ids(model, batch):
        return model(**batch, labels=batch["input_ids"], attention_mask=(batch["input_ids"] != 0).long()).loss

    model = llama().train()
    ids = torch.randint(1, 50, (2, 24))
    padded = ids.clone()
    padded[0, -5:] = 0
    step = stepgraph.capture(model, of_ids, {"input_ids": ids}, passes="exact")
    for given in (ids, padded, ids.flip(1), padded.flip(0)):
        assert step.verify({"input_ids": given}).bitwise
    halves = stepgraph.capture(model, of_ids, {"input_ids": ids}, accumulate=2, passes="exact")
    for given in (ids, torch.cat([padded[:1]] * 2), ids.flip(1)):
        assert halves.verify({"input_ids": given}).bitwise
    with pytest.warns(UserWarning, match=r"a mask of shape \[1, 24\] hides nothing in one microbatch"):
        halves({"input_ids": padded})
