"""The options of a step: one record for `capture`, train, bench and plan.

A new option is a field here and the pass that reads it (``from_options`` where it is registered): the command lines,
``config.json`` and the forecast take it from there. A field's docstring is what ``--help`` prints, so each is one line.
"""

import typing
from dataclasses import dataclass, fields
from typing import Any, Literal

from stepgraph.errors import require_words, unknown_name
from stepgraph.passes.contract import get
from stepgraph.passes.loss.chunk import check_chunks
from stepgraph.passes.memory.recompute import parse_policy


@dataclass(frozen=True)
class StepOptions:
    """Which passes run over a step, and how. Give it to ``stepgraph.capture(passes=StepOptions(...))``."""

    # -- passes and kernels -------------------------------------------------------------------------------------------
    passes: Literal["exact", "default"] = "default"
    """exact: only passes that stay bitwise equal to eager. default: also passes that may round differently."""

    disable_pass: tuple[str, ...] = ()
    """Leave a pass out, by name."""

    memory: str = "none"
    """Activations to recompute: none, full, selective, or keep at most budget=40GiB or budget=0.5 (a share of all)."""

    inductor: Literal["full", "regional", "off"] = "full"
    """full: compile the graph with Inductor, up to a minute; regional: only norms, RoPE, SwiGLU; off: nothing."""

    any_length: bool = False
    """Compile for batches of any length: only the first compiles. Kernels may be slower than for one length."""

    norm: Literal["auto", "kernel", "inductor", "eager"] = "auto"
    """How RMS and layer norms run: our kernels, inside Inductor's, or operator by operator; auto: the fastest each."""

    attention: Literal["auto", "cudnn", "flash2", "fa4", "flex", "eager"] = "auto"
    """Kernels of attention: cuDNN's, FlashAttention 2 or 4, Flex, or as torch chose; auto: the fastest measured."""

    grouped: Literal["torch", "quack", "auto"] = "auto"
    """Products of experts' rows by torch's kernels, or QuACK's (pip install quack-kernels); auto: the faster ones."""

    loss_chunks: int | Literal["auto"] = "auto"
    """Split logits and loss into N chunks of the tokens to save memory; auto: as many as keep the logits near a GiB."""

    fp8: Literal["off", "tensorwise", "rowwise", "rowwise-bf16-weight-gradients"] = "off"
    """Multiply in fp8 in linear layers, with one scale for each matrix or each row; heads and routers stay in bf16."""

    fp8_skip: tuple[str, ...] = ()
    """Leave linear layers in bf16, by a pattern of their module paths, as in layers.0.*"""

    reshard: Literal["auto", "always", "never"] = "auto"
    """Gather parameters again in backward instead of keeping them. auto: where the GPU's memory would not do."""

    async_tp: bool = False
    """Multiply chunks of the sequence while others travel: collectives of tensor parallelism, inside one machine."""

    copy_engines: bool = False
    """Gather parameters and reduce gradients by the GPUs' copy engines, not NCCL's kernels: inside one machine."""

    cuda_graph: bool = True
    """Replay the whole step as one CUDA graph. No effect on a CPU."""

    @property
    def compiles_all(self) -> bool:
        """Whether Inductor compiles the whole graph."""
        return self.inductor == "full" and self.passes == "default" and "inductor" not in self.disable_pass

    @property
    def compiles_attention(self) -> bool:
        """Whether Inductor compiles FlexAttention: within the whole graph, or as a region."""
        needed = {"inductor", "tag_regions"} if self.inductor == "regional" else {"inductor"}
        return self.inductor != "off" and self.passes == "default" and not needed & set(self.disable_pass)

    def validate_step(self, *, tp: int | None = None, dp_shard: int | None = None) -> None:
        """Raise ``ValueError``, in one line, for the first option that cannot be right or could do nothing.

        ``tp``, ``dp_shard``: sizes of the mesh that the step will run on, None where they are not known.
        """
        for name, allowed in choices().items():
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        for name in ("disable_pass", "fp8_skip"):
            require_words(name, getattr(self, name))
        parse_policy(self.memory)
        check_chunks(self.loss_chunks)
        for name in self.disable_pass:
            get(name)
        if self.passes == "exact" and self.norm != "auto":
            raise ValueError(f"norm={self.norm} with passes=exact, which leaves norms to eager: drop one of them")
        if self.passes == "exact" and self.attention not in ("auto", "eager"):
            raise ValueError(
                f"attention={self.attention} with passes=exact, which leaves attention to eager: drop one of them"
            )
        if self.passes == "exact" and self.grouped == "quack":
            raise ValueError("grouped=quack with passes=exact, which leaves products to torch: drop one of them")
        if self.attention == "flex" and not self.compiles_attention:
            why = "inductor=off" if self.inductor == "off" else f"disable_pass={','.join(self.disable_pass)}"
            raise ValueError(
                f"attention=flex with {why}: FlexAttention's kernels are Inductor's; allowed then: attention=auto, "
                "cudnn, flash2, fa4 or eager: choose one, or inductor=regional"
            )
        if self.norm == "inductor" and self.inductor == "off":
            raise ValueError("norm=inductor with inductor=off; allowed then: norm=auto, kernel or eager")
        if self.async_tp and tp == 1:
            raise ValueError("async_tp overlaps tensor parallelism and there is none: add tp=2 to the mesh")
        if self.copy_engines and dp_shard == 1:
            raise ValueError("copy_engines serves FSDP and nothing is sharded: add fsdp=2 to the mesh")
        if self.fp8 != "off" and self.passes == "exact":
            raise ValueError(f"fp8={self.fp8} rounds to fp8, which passes=exact forbids: drop one of them")
        if self.fp8_skip and self.fp8 == "off":
            raise ValueError("fp8_skip leaves layers out of fp8 and fp8=off: add fp8=tensorwise or rowwise, or drop it")
        for name in ("async_tp", "copy_engines"):
            if getattr(self, name) and self.passes == "exact":
                raise ValueError(f"{name} sums in another order, which passes=exact forbids: drop one of them")


def choices() -> dict[str, tuple[Any, ...]]:
    """Field -> its allowed values, of every field of `StepOptions` that has a fixed set of them."""
    hints = typing.get_type_hints(StepOptions)
    found = {field.name: hints[field.name] for field in fields(StepOptions)}
    sets = {name: typing.get_args(hint) for name, hint in found.items() if typing.get_origin(hint) is Literal}
    return sets | {name: (True, False) for name, hint in found.items() if hint is bool}
