"""TRL's trainers as captured steps: the losses, metrics and weights of plain TRL."""

import contextlib

import pytest
import torch

pytest.importorskip("datasets")
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    set_seed,
)
from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)  # fmt: skip
from trl.trainer.dpo_trainer import DataCollatorForPreference  # noqa: E402

from stepgraph.integrations import GraphStep, PadToLengths  # noqa: E402

pytestmark = pytest.mark.long
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"]
SHAPE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


class GraphSFT(GraphStep, SFTTrainer):
    pass


class GraphDPO(GraphStep, DPOTrainer):
    pass


class GraphKTO(GraphStep, KTOTrainer):
    pass


class GraphGRPO(GraphStep, GRPOTrainer):
    pass


class GraphReward(GraphStep, RewardTrainer):
    pass


def tokenizer():
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(kind=AutoModelForCausalLM, **options):
    set_seed(0)
    config = Qwen3Config(vocab_size=len(WORDS), head_dim=8, pad_token_id=0, eos_token_id=1, **SHAPE, **options)
    return kind.from_config(config)


def scorer():
    return model(AutoModelForSequenceClassification, num_labels=1)


def adapter():
    peft = pytest.importorskip("peft")
    set_seed(0)
    return {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}


def words(count, seed):
    chosen = torch.randint(3, len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in chosen)


def chats():
    return Dataset.from_list([{"prompt": words(3, i), "completion": " " + words(5, 100 + i)} for i in range(8)])


def pairs():
    return Dataset.from_list(
        [
            {"prompt": words(3, i), "chosen": " " + words(4, 50 + i), "rejected": " " + words(4, 90 + i)}
            for i in range(8)
        ]
    )


def liked():
    return Dataset.from_list(
        [{"prompt": words(3, i), "completion": " " + words(4, 50 + i), "label": i % 3 > 0} for i in range(8)]
    )


def prompts():
    return Dataset.from_list([{"prompt": words(3, i)} for i in range(8)])


CASES = {
    "sft": (SFTTrainer, GraphSFT, SFTConfig, chats, model, dict),
    "dpo": (DPOTrainer, GraphDPO, DPOConfig, pairs, model, lambda: {"ref_model": model()}),
    "lengths": (
        *(DPOTrainer, GraphDPO, DPOConfig, pairs, model),
        lambda: {
            "ref_model": model(),
            "data_collator": PadToLengths([24], DataCollatorForPreference(pad_token_id=0), causal=True),
        },
    ),
    "accumulated": (
        *(SFTTrainer, GraphSFT, SFTConfig, chats, model, dict),
        {"gradient_accumulation_steps": 2, "logging_steps": 1},
    ),
    "adapter": (DPOTrainer, GraphDPO, DPOConfig, pairs, model, adapter),
    "reward": (RewardTrainer, GraphReward, RewardConfig, pairs, scorer, dict),
    "liked": (KTOTrainer, GraphKTO, KTOConfig, liked, model, lambda: {"ref_model": model()}),
    "generated": (
        *(GRPOTrainer, GraphGRPO, GRPOConfig, prompts, model),
        lambda: {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]},
        {
            **{"num_generations": 2, "max_completion_length": 4, "num_iterations": 2, "eval_strategy": "no"},
            **{"top_entropy_quantile": 0.5, "gradient_checkpointing": True},
        },
    ),
}


def trained(trainer, folder, config, data, model, others, options=None):
    arguments = config(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2,
        num_train_epochs=2, save_strategy="no", bf16=False, learning_rate=1e-2,
        **{"eval_strategy": "epoch", "logging_steps": 2, "gradient_checkpointing": False} | (options or {}),
    )  # fmt: skip
    own = {"passes": "exact"} if issubclass(trainer, GraphStep) else {}
    made = trainer(
        model=model(),
        args=arguments,
        train_dataset=data(),
        **({} if (options or {}).get("eval_strategy") == "no" else {"eval_dataset": data()}),
        processing_class=tokenizer(),
        **own,
        **others(),
    )
    made.train()
    skipped = ("runtime", "per_second", "total_flos", "step_time")
    return made, [
        {k: v for k, v in log.items() if not any(word in k for word in skipped)} for log in made.state.log_history
    ]


@pytest.mark.filterwarnings("error:.*before compute_loss stored it", "error:.*the step is captured again")
@pytest.mark.parametrize("case", CASES)
def test_same_as_plain_trl(tmp_path, case):
    plain, graph, *given = CASES[case]
    first, second = (trained(kind, tmp_path / kind.__name__, *given) for kind in (plain, graph))
    assert first[1] == second[1]
    assert len(first[1]) >= 3 and len(first[1][0]) >= 7
    for (name, p), q in zip(first[0].model.named_parameters(), second[0].model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_offloading_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", lambda model: contextlib.ExitStack())
    with pytest.raises(ValueError, match="activation_offloading=True"):
        trained(GraphSFT, tmp_path, SFTConfig, chats, model, dict, {"activation_offloading": True})
