"""Every option of a run, each declared once, in parts: data, batch, device, optimizer, mesh, processes, step, records.

A command takes the parts that it needs: `stepgraph.config.train.TrainConfig` is all of them with a model, ``stepgraph
plan`` reads the parts of the step, its batch and its mesh. A field's docstring is what ``--help`` prints, so each is
one line. Nothing here imports torch: help and wrong names do not wait for it.
"""

import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class DataOptions:
    """What is read."""

    data: str = "stdlib"
    """stdlib, FILE.txt, FILE.jsonl (or .gz), FILE.parquet, hf:NAME, hf-stream:NAME; several, patterns; A:0.7,B:0.3."""

    text_field: str = "text"
    """Field or column that holds the text, in jsonl and parquet files and Hugging Face's data sets."""

    val_data: str | None = None
    """Validate on these, each with its own loss in the metrics: A,B. None: on 5% of --data, of each of its parts."""

    tokenizer: str = "bytes"
    """bytes (one token per byte) or the path of a tokenizer.json."""

    data_cache: Path | None = None
    """Folder for tokens, written once for each pair of data and tokenizer; default ~/.cache/stepgraph/tokens."""

    document_mask: Literal["auto", "on", "off"] = "auto"
    """on: attention stays within each document of a row, whose positions begin at 0. auto: on for conversations."""


@dataclass(frozen=True)
class LossOptions:
    """What is learned."""

    loss: Literal["cross-entropy", "dpo"] = "cross-entropy"
    """dpo: direct preference optimization, on pairs of a chosen and a rejected answer, next to a frozen reference."""

    beta: float = 0.1
    """With --loss dpo, how strongly the reference holds the model: rewards are beta times log-probability ratios."""

    label_smoothing: float = 0.0
    """With --loss dpo, the share of pairs whose preference is assumed to be wrong, in [0, 0.5)."""

    reference: Path | None = None
    """With --loss dpo, the frozen model's folder. None: the initial weights; with --lora, no adapter."""


@dataclass(frozen=True)
class BatchOptions:
    """The batch of a step."""

    seq_len: int = 256
    """Tokens in a sequence."""

    batch_size: int = 8
    """Sequences in a microbatch of one data-parallel rank."""

    precision: Literal["fp32", "bf16-autocast", "bf16"] = "fp32"
    """bf16-autocast: fp32 parameters, torch.autocast. bf16: bf16 parameters, fp32 master weights and AdamW state."""


@dataclass(frozen=True)
class DeviceOptions:
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU, otherwise cpu."""


@dataclass(frozen=True)
class UpdateOptions:
    """The update of a step."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks, AdamW for all else; both with the learning rate and decay of AdamW."""


@dataclass(frozen=True)
class OptimizerOptions(UpdateOptions):
    """Length and optimizer."""

    steps: int = 150
    """Optimizer updates in the whole run; after --resume those already done count too."""

    epochs: float | None = None
    """Passes over the training data, in place of --steps."""

    seed: int = 0
    """Seeds the weights, the data order and dropout. On a CPU, two runs with one seed are bitwise equal."""

    lr: float = 2e-3
    """Peak learning rate."""

    min_lr_ratio: float = 0.1
    """Learning rate at the end of the decay, as a share of --lr."""

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine decay, wsd (stable, then a 1 - sqrt decay at the end) or constant."""

    warmup_steps: int = 10
    """Steps of linear warm-up."""

    decay_fraction: float = 0.2
    """Share of --steps that the decay of the wsd schedule takes, in (0, 1]."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""

    eps: float = 1e-8
    """AdamW's epsilon."""

    weight_decay: float = 0.1
    """AdamW's decoupled weight decay."""

    max_grad_norm: float | None = 1.0
    """Clip gradients to this total L2 norm. None: no clipping."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient norm is not finite: stop the run, or skip the step without any change."""

    max_skipped: int = 10
    """With --on-nonfinite skip: stop after this many consecutive skipped steps."""


@dataclass(frozen=True)
class MeshOptions:
    """Microbatches and ranks."""

    accumulate: int = 1
    """Microbatches in a step: a step takes accumulate * batch_size * seq_len tokens per data-parallel rank."""

    mesh: str | None = None
    """Ranks, as in pp=2,fsdp=4,tp=2: fsdp=N, ddp=N or hsdp=REPLICASxSHARDS; cp, tp, pp, ep. None: one process."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype that gradients are reduced in over the mesh."""

    context: Literal["auto", "ulysses", "gather"] = "auto"
    """With cp: exchange tokens for heads (ulysses), or gather keys and values; auto: by heads where cp divides them."""

    pipeline: Literal["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"] | None = None
    """With pp in the mesh, the order in which its ranks run the --accumulate microbatches. None: 1f1b."""

    split: str | None = None
    """With pp, the first block of each stage, as in 0,9,17,25. None: the most even cut by the cost model."""

    stage_sends: Literal["point-to-point", "symmetric"] = "point-to-point"
    """With pp: how stages send, through process groups (NCCL), or within a machine into each other's memory."""

    expert_capacity: float = 2.0
    """With ep: size of exchange buffers over the balanced load. A step that needs more is repeated with larger ones."""

    expert_chunks: int | Literal["auto"] = 1
    """With ep: split a layer's tokens into N chunks; one travels while experts compute another. auto: by cost."""

    expert_exchange: Literal["collectives", "symmetric"] = "collectives"
    """With ep: how tokens travel, by torch's collectives, or within a machine over symmetric memory, by our kernels."""


@dataclass(frozen=True)
class LaunchOptions:
    """Processes."""

    nproc: int | None = None
    """Number of processes to start on this machine, one per device. Not with torchrun, which starts them itself."""

    max_restarts: int = 0
    """With --nproc: how often all ranks start again from the newest checkpoint when one fails. torchrun has its own."""

    comm_timeout: float = 300.0
    """Seconds that ranks may take to start, and a step beyond the slowest one so far, before all ranks end as hung."""

    first_step_timeout: float = 60.0
    """Seconds in the first steps without progress of any rank before all end as hung; compiling counts as progress."""


@dataclass(frozen=True)
class StepOptions:
    """Which passes run over a step, and how. Give it to ``stepgraph.capture(passes=StepOptions(...))``."""

    passes: Literal["exact", "default"] = "default"
    """exact: only passes that stay bitwise equal to eager. default: also passes that may round differently."""

    disable_pass: tuple[str, ...] = ()
    """Leave a pass out, by name."""

    memory: str = "none"
    """Activations to recompute: none, full, selective, or keep at most budget=40GiB or budget=0.5 (a share of all);
    peak=70GiB or peak=90% (of the GPU): recompute and offload as little as needed; layers.*.mlp=recompute,
    =offload or =keep, alone or after a comma: for modules."""

    offload_optimizer: bool = False
    """Keep the optimizer's state in page-locked host memory, and update parameters in parts of about a GiB of state."""

    inductor: Literal["full", "regional", "off"] = "full"
    """full: compile the graph with Inductor, up to a minute; regional: only norms, RoPE, SwiGLU; off: nothing."""

    any_length: bool = False
    """Serve batches of any length: only the first is compiled, by kernels that may be slower than for one length, and
    from the seventh on most are not traced."""

    norm: Literal["auto", "kernel", "inductor", "eager"] = "auto"
    """How RMS and layer norms run: our kernels, inside Inductor's, or operator by operator; auto: the fastest for
    each."""

    attention: Literal["auto", "cudnn", "flash2", "fa4", "flex", "eager"] = "auto"
    """Kernels of attention: cuDNN's, FlashAttention 2 or 4, Flex, or as torch chose; auto: the fastest measured."""

    epilogues: Literal["torch", "quack", "auto"] = "torch"
    """GELU and its gradient apart, or in QuACK's products (pip install quack-kernels); auto: where those were measured
    to be faster alone."""

    loss_chunks: int | Literal["auto"] = "auto"
    """Split logits and loss into N chunks of the tokens to save memory; auto: as many as keep the logits near a GiB."""

    tiles: int | Literal["auto"] = "auto"
    """Compute MLPs, norms and projections in N tiles of the sequence, and again in backward, to save memory; auto:
    one, or with --memory peak= as many as needed."""

    fp8: Literal["off", "tensorwise", "rowwise", "rowwise-bf16-weight-gradients"] = "off"
    """Multiply in fp8 in linear layers, with one scale for each matrix or each row; heads and routers stay in bf16."""

    fp8_skip: tuple[str, ...] = ()
    """Leave linear layers in bf16, by a pattern of their module paths, as in layers.0.*"""

    fp8_experts: bool = False
    """With --fp8, multiply experts' rows in fp8 too, with one scale for each row."""

    reshard: Literal["auto", "always", "never"] = "auto"
    """Gather parameters again in backward instead of keeping them. auto: where the GPU's memory would not suffice."""

    async_tp: bool = False
    """Overlap the collectives of tensor parallelism with matrix products, chunk by chunk; within one machine."""

    copy_engines: bool = False
    """Gather parameters and reduce gradients by the GPUs' copy engines, not NCCL's kernels; within one machine."""

    cuda_graph: bool = True
    """Replay the whole step as one CUDA graph. No effect on a CPU."""

    @property
    def may_offload_optimizer(self) -> bool:
        """Whether the optimizer's state, or as much of it as a peak of memory needs, goes to the host."""
        return self.offload_optimizer or self.memory.startswith("peak")

    @property
    def compiles_all(self) -> bool:
        """Whether Inductor compiles the whole graph."""
        return self.inductor == "full" and self.passes == "default" and "inductor" not in self.disable_pass

    @property
    def compiles_attention(self) -> bool:
        """Whether Inductor compiles FlexAttention: within the whole graph, or as a region."""
        needed = {"inductor", "tag_regions"} if self.inductor == "regional" else {"inductor"}
        return self.inductor != "off" and self.passes == "default" and not needed & set(self.disable_pass)


@dataclass(frozen=True)
class RecordOptions:
    """Validation, checkpoints and records."""

    val_every: int = 50
    """Steps between validations. 0: only at the end."""

    val_batches: int = 8
    """Microbatches in a validation."""

    sample_every: int = 0
    """Steps between samples of text, a multiple of --val-every; the end of the run has one too. 0: none."""

    sample_prompt: str = ""
    """What samples begin with; in a run on conversations, a user's message. Empty: the start of a document."""

    checkpoint_every: int = 50
    """Steps between checkpoints. 0: only at the end."""

    save: Literal["auto", "behind", "wait"] = "auto"
    """behind: train while a copy of the state in host memory is written; wait: until it is written; auto: by device."""

    keep_checkpoints: int = 2
    """Newest checkpoints kept; older ones are deleted."""

    keep_every: int = 0
    """Steps between checkpoints that are never deleted. 0: only the newest are kept."""

    log_every: int = 1
    """Steps between progress lines and metric records."""

    log: Literal["tensorboard", "wandb"] = "tensorboard"
    """wandb: metrics go to Weights & Biases as well as TensorBoard and metrics.jsonl; needs stepgraph[wandb]."""

    verbose: bool = False
    """Also print what each pass did to the graph, as in passes.txt."""

    dump_graphs: bool = False
    """Write the graph before and after each pass, as readable text, into the run folder."""

    verify: bool = False
    """Compare the captured step with eager before the first step; with --passes exact, end where a bit differs."""

    profile: str | None = None
    """Trace these steps, as in 10:13 (10, 11 and 12), for Perfetto, and put measured times on the run's page."""

    memory_snapshot: bool = False
    """Record the GPU's allocations in the first steps, for torch's memory viewer: memory_snapshot.pickle."""

    saved_steps: str = "auto"
    """Folder of saved steps: load the compiled step from there, or save it there. auto: your cache; off: neither."""

    out: Path | None = None
    """Run folder, new or empty; of compile, the folder for the saved step. None: runs/PRESET-UTC_TIME."""

    resume: Path | None = None
    """Continue the run in this folder, or from RUN/checkpoints/step-N; its config.json gives the options' defaults."""

    init_from_hf: Path | None = None
    """Start from the Hugging Face checkpoint in this folder, or of this name on the Hub; without PRESET, its model."""

    lora: str | None = None
    """Train an adapter by peft, as in r=16,alpha=32,targets=all-linear (or q_proj+experts); dropout=0.1, dora and
    rslora may follow. None: train all weights."""

    quantize: Literal["nf4", "fp8"] | None = None
    """With --lora, frozen linear layers in 4 bits as bitsandbytes has them (QLoRA), or in fp8. None: as they are."""

    export_hf: Path | None = None
    """At the end, write the weights to this folder as a Hugging Face checkpoint."""


#: What `TrainConfig` has besides a model.
PARTS = (
    *(DataOptions, LossOptions, BatchOptions, OptimizerOptions, DeviceOptions, MeshOptions, LaunchOptions),
    *(StepOptions, RecordOptions),
)


def names(*parts: type) -> tuple[str, ...]:
    """The names of the options of ``parts``."""
    return tuple(field.name for part in parts for field in fields(part))


def values(record: object, *parts: type) -> dict[str, Any]:
    """The options of ``parts`` in ``record``, which is made of them and others."""
    return {name: getattr(record, name) for name in names(*parts)}


def differences(one: object, other: object, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Option -> its values in two records of one kind, for the ones that differ; nested ones as ``model.dim``."""
    found: dict[str, tuple[Any, Any]] = {}
    for field in fields(one):  # pyrefly: ignore[bad-argument-type]
        pair = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(pair[0]) and type(pair[0]) is type(pair[1]):
            found |= differences(*pair, f"{prefix}{field.name}.")
        elif pair[0] != pair[1]:
            found[prefix + field.name] = pair
    return found


def choices(*parts: type) -> dict[str, tuple[Any, ...]]:
    """Option -> its allowed values, of every option of ``parts`` that has a fixed set of them."""
    found = {field.name: [allowed(kind) for kind in kinds(field.type)] for part in parts for field in fields(part)}
    return {name: tuple(value for some in sets for value in some) for name, sets in found.items() if all(sets)}


def kinds(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type: ``int`` and ``Literal["auto"]`` of ``int | Literal["auto"]``."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def allowed(kind: Any) -> tuple[Any, ...]:
    """The values of a type that has few; () for any other."""
    fixed = {bool: (True, False), types.NoneType: (None,)}
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else fixed.get(kind, ())
