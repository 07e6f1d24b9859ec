"""The models that torchtitan and we both have: its arguments for a shape of ours, and where its weights are in ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepgraph.models import Llama3Config
from stepgraph.models.deepseek_v3.deepseek_v3 import LATENT_EPS, DeepSeekV3Config
from stepgraph.models.rope import rope_tables


@dataclass(frozen=True)
class Origin:
    """Where a parameter of torchtitan's is in our model: in the parameter ``name``, from ``first`` on in its dimension
    1 (of experts, whose gate and up projections are one parameter here). ``heads``: its rows are heads of which RoPE
    rotates neighbours there and halves here."""

    name: str
    first: int = 0
    heads: bool = False


@dataclass(frozen=True)
class Peer:
    """A family in torchtitan. ``module``: that has it; ``arguments(config)``: its model arguments; ``origins(config)``:
    its matrices, by name below a block; ``unfit(config)``: reason -> whether it is why a shape cannot be built there;
    ``finish(model, config)``: gives the model what is neither argument nor parameter."""

    module: str
    arguments: Callable[[Any], Any]
    origins: Callable[[Any], Mapping[str, Origin]]
    unfit: Callable[[Any], dict[str, bool]] = lambda config: {}
    finish: Callable[[nn.Module, Any], None] = lambda model, config: None


#: What both families have.
_OUTER = {"tok_embeddings.weight": Origin("embed.weight"), "output.weight": Origin("head.weight")}


def _swiglu(theirs: str, ours: str) -> dict[str, Origin]:
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return {f"{theirs}.{there}.weight": Origin(f"{ours}.{here}.weight") for there, here in names.items()}


def llama3_sizes(model: Llama3Config) -> dict[str, Any]:
    """The fields of torchtitan's ``TransformerModelArgs`` for a model of the same dimensions.

    It derives the width of the feed-forward from ``dim``: ``int(ffn_dim_multiplier * int(8 * dim / 3))``, rounded up to
    a multiple of ``multiple_of``. A multiplier that lands below ``ffn_dim`` and that as the multiple give it exactly.
    """
    scaling = model.rope_scaling
    same = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta")
    return {name: getattr(model, name) for name in same} | {
        "multiple_of": model.ffn_dim,
        "ffn_dim_multiplier": 0.5 * model.ffn_dim / int(8 * model.dim / 3),
        "rope_scaling_args": {
            "scaling_factor": scaling.factor if scaling else 1.0,
            "low_freq_factor": scaling.low_freq_factor if scaling else 1.0,
            "high_freq_factor": scaling.high_freq_factor if scaling else 4.0,
            "original_max_position_embeddings": scaling.original_max_seq_len if scaling else 8192,
        },
        "depth_init": False,
    }


def _llama3_arguments(model: Llama3Config) -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    sizes = llama3_sizes(model)
    return TransformerModelArgs(**sizes | {"rope_scaling_args": RoPEScalingArgs(**sizes["rope_scaling_args"])})


def _llama3_origins(_: Llama3Config) -> dict[str, Origin]:
    attention = {
        f"attention.{there}.weight": Origin(f"attn.{here}.weight", heads=there in ("wq", "wk"))
        for there, here in {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}.items()
    }
    return _OUTER | attention | _swiglu("feed_forward", "mlp")


def deepseek_v3_sizes(model: DeepSeekV3Config) -> dict[str, Any]:
    """The fields of torchtitan's ``DeepSeekV3ModelArgs`` for a model of the same dimensions, attention by SDPA."""
    moe = model.moe
    grouped = {"num_expert_groups": moe.n_groups, "num_limited_groups": moe.top_groups} if moe.n_groups > 1 else {}
    same = ("dim", "n_layers", "n_dense_layers", "n_heads", "vocab_size", "norm_eps", "rope_theta", "kv_lora_rank")
    same += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: getattr(model, name) for name in same} | {
        "inter_dim": model.ffn_dim,
        "moe_inter_dim": moe.ffn_dim,
        "q_lora_rank": model.q_lora_rank or 0,
        "attn_type": "sdpa",
        "attn_mask_type": "causal",
        "moe_args": {
            "num_experts": moe.n_experts,
            "num_shared_experts": moe.n_shared,
            "top_k": moe.top_k,
            "score_func": moe.scoring,
            "route_norm": moe.normalize,
            "route_scale": moe.scale,
            "score_before_experts": False,
            "load_balance_coeff": moe.balance_rate if moe.selection_bias and moe.balance_rate else None,
            **grouped,
        },
    }


def _deepseek_v3_arguments(model: DeepSeekV3Config) -> Any:
    from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
    from torchtitan.models.moe import MoEArgs

    sizes = deepseek_v3_sizes(model)
    return DeepSeekV3ModelArgs(**sizes | {"moe_args": MoEArgs(**sizes["moe_args"])})


def _deepseek_v3_origins(model: DeepSeekV3Config) -> dict[str, Origin]:
    attention = {"wq": "q_proj", "wq_a": "q_a_proj", "wq_b": "q_b_proj"}
    attention |= {"wkv_a": "kv_a_proj", "wkv_b": "kv_b_proj", "wo": "o_proj"}
    experts = "mlp.experts.gate_up_proj.weight"
    return (
        _OUTER
        | {f"attention.{there}.weight": Origin(f"attn.{here}.weight") for there, here in attention.items()}
        | _swiglu("feed_forward", "mlp")
        | _swiglu("moe.shared_experts", "mlp.shared")
        | {
            "moe.router.gate.weight": Origin("mlp.router.weight"),
            "moe.experts.w1": Origin(experts),
            "moe.experts.w2": Origin("mlp.experts.down_proj.weight"),
            "moe.experts.w3": Origin(experts, first=model.moe.ffn_dim),
        }
    )


def _deepseek_v3_unfit(model: DeepSeekV3Config) -> dict[str, bool]:
    by_one = model.moe.scoring == "softmax" and model.moe.n_groups > 1
    return {
        "it ranks groups by their best two scores, softmax here by the best one: add --model.moe.n-groups 1": by_one,
        "it has no balance loss of sequences: add --model.moe.balance-loss 0": model.moe.balance_loss > 0,
    }


def _deepseek_v3_finish(model: nn.Module, config: DeepSeekV3Config) -> None:
    """Our rotations, scale of scores and eps of norms. It stretches RoPE only in sequences longer than the original,
    gives norms of latents the others' eps, and the last norm torch's own."""
    cos, signed_sin = rope_tables(
        model.freqs_cis.shape[0], config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    )
    half = config.qk_rope_head_dim // 2
    model.freqs_cis.copy_(torch.complex(cos[:, 0, :half], signed_sin[:, 0, half:]))
    yarn = config.rope_scaling
    for name, module in model.named_modules():
        if hasattr(module, "softmax_scale"):
            module.softmax_scale = config.qk_head_dim**-0.5 * (1.0 if yarn is None else yarn.score_scale)
        if isinstance(module, nn.RMSNorm):
            module.eps = LATENT_EPS if name.endswith(("q_norm", "kv_norm")) else config.norm_eps


#: By the name of our family.
PEERS = {
    "llama3": Peer("torchtitan.models.llama3", _llama3_arguments, _llama3_origins),
    "deepseek_v3": Peer(
        "torchtitan.models.deepseek_v3",
        _deepseek_v3_arguments,
        _deepseek_v3_origins,
        _deepseek_v3_unfit,
        _deepseek_v3_finish,
    ),
}
