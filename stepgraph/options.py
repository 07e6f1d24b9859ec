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
    """stdlib, FILE.txt, FILE.jsonl (or .gz), FILE.parquet, hf:NAME, hf-stream:NAME; patterns; A,B or A:0.7,B:0.3."""

    text_field: str = "text"
    """Field or column that holds the text, in jsonl and parquet files and Hugging Face's data sets."""

    val_data: str | None = None
    """Validate on these sets, A,B, each with its own loss in the metrics. Default: 5% of each part of --data."""

    tokenizer: str = "bytes"
    """bytes (one token per byte) or the path of a tokenizer.json."""

    data_cache: Path | None = None
    """Token cache, written once per data and tokenizer. Default: ~/.cache/stepgraph/tokens."""

    document_mask: Literal["auto", "on", "off"] = "auto"
    """on: attention stays within each document, with positions from 0. auto: on for conversations."""


@dataclass(frozen=True)
class LossOptions:
    """What is learned."""

    loss: Literal["cross-entropy", "dpo"] = "cross-entropy"
    """dpo: direct preference optimization, on pairs of a chosen and a rejected answer, next to a frozen reference."""

    beta: float = 0.1
    """With --loss dpo, how strongly the model is kept near the reference: rewards are beta times log ratios."""

    label_smoothing: float = 0.0
    """With --loss dpo, the share of pairs whose preference is assumed to be wrong, in [0, 0.5)."""

    reference: Path | None = None
    """With --loss dpo, the frozen model's folder. Default: the initial weights; with --lora, no adapter."""


@dataclass(frozen=True)
class BatchOptions:
    """Batch of a step."""

    seq_len: int = 256
    """Tokens per sequence."""

    batch_size: int = 8
    """Sequences per microbatch and data-parallel rank."""

    precision: Literal["fp32", "bf16-autocast", "bf16"] = "fp32"
    """bf16-autocast: fp32 parameters, torch.autocast. bf16: bf16 parameters, fp32 master weights and AdamW state."""


@dataclass(frozen=True)
class DeviceOptions:
    """Device."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU, otherwise cpu."""


@dataclass(frozen=True)
class UpdateOptions:
    """Update of a step."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the blocks' matrices, AdamW for the rest, both with --lr and --weight-decay."""


@dataclass(frozen=True)
class OptimizerOptions(UpdateOptions):
    """Length and optimizer."""

    steps: int = 150
    """Optimizer updates in the whole run, including those before --resume."""

    epochs: float | None = None
    """Passes over the training data, instead of --steps."""

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
    """With --schedule wsd, the share of --steps spent decaying, in (0, 1]."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""

    eps: float = 1e-8
    """AdamW's epsilon."""

    weight_decay: float = 0.1
    """AdamW's decoupled weight decay."""

    max_grad_norm: float | None = 1.0
    """Clip gradients to this total L2 norm. None: no clipping."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient norm that is not finite: stop the run, or skip the step and change nothing."""

    max_skipped: int = 10
    """With --on-nonfinite skip: stop after this many consecutive skipped steps."""


@dataclass(frozen=True)
class MeshOptions:
    """Microbatches and ranks."""

    accumulate: int = 1
    """Microbatches per step; a step has accumulate * batch_size * seq_len tokens per data-parallel rank."""

    mesh: str | None = None
    """Mesh, as in pp=2,fsdp=4,tp=2: fsdp=N, ddp=N or hsdp=REPLICASxSHARDS; cp, tp, pp, ep. Default: one process."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype that gradients are reduced in over the mesh."""

    context: Literal["auto", "ulysses", "gather"] = "auto"
    """With cp: exchange tokens for heads (ulysses), or gather keys and values. auto: ulysses if cp divides heads."""

    pipeline: Literal["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"] | None = None
    """With pp: the schedule of the --accumulate microbatches. Default: 1f1b."""

    split: str | None = None
    """With pp: the first block of each stage, as in 0,9,17,25. Default: balanced by the cost model."""

    stage_sends: Literal["point-to-point", "symmetric"] = "point-to-point"
    """With pp: send through process groups (NCCL), or within one machine into the receiver's memory (symmetric)."""

    expert_capacity: float = 2.0
    """With ep: buffer size in units of the balanced load. A step that needs more is repeated with larger buffers."""

    expert_chunks: int | Literal["auto"] = 1
    """With ep: split a layer's tokens into N chunks; one is sent while another is computed. auto: by forecast cost."""

    expert_exchange: Literal["collectives", "symmetric"] = "collectives"
    """With ep: send tokens by torch's collectives, or within one machine in our kernels over symmetric memory."""


@dataclass(frozen=True)
class LaunchOptions:
    """Processes."""

    nproc: int | None = None
    """Number of processes to start on this machine, one per device. Not with torchrun, which starts them itself."""

    max_restarts: int = 0
    """With --nproc: how often all ranks restart from the newest checkpoint after a failure. torchrun has its own."""

    comm_timeout: float = 300.0
    """Seconds that ranks may take to start, or a step to exceed the slowest so far, before all ranks end as hung."""

    first_step_timeout: float = 60.0
    """Seconds without progress on any rank in the first steps before all end as hung; compiling counts as progress."""


@dataclass(frozen=True)
class StepOptions:
    """Which passes run over a step, and how. Pass it to ``stepgraph.capture(passes=StepOptions(...))``."""

    passes: Literal["exact", "default"] = "default"
    """exact: only passes that stay bitwise equal to eager. default: also passes that may round differently."""

    disable_pass: tuple[str, ...] = ()
    """Name of a pass to leave out."""

    memory: str = "none"
    """Activations to recompute: none, selective or full; budget=40GiB or budget=0.5 (of all): keep at most this;
    peak=70GiB or peak=90% (of the GPU): recompute and offload as little as needed. For modules, alone or after a
    comma: layers.*.mlp=recompute, =offload or =keep."""

    offload_optimizer: bool = False
    """Keep the optimizer's state in page-locked host memory, and update parameters in parts of about a GiB of state."""

    inductor: Literal["full", "regional", "off"] = "full"
    """full: compile the graph with Inductor, up to a minute; regional: only norms, RoPE, SwiGLU; off: nothing."""

    any_length: bool = False
    """Compile once for batches of any length, with kernels that may be slower. From the seventh length on, most are not
    traced either."""

    norm: Literal["auto", "kernel", "inductor", "eager"] = "auto"
    """How RMS and layer norms run: our kernels, inside Inductor's, or operator by operator; auto: the fastest for
    each."""

    attention: Literal["auto", "cudnn", "flash2", "fa4", "flex", "eager"] = "auto"
    """Attention kernels: cuDNN, FlashAttention 2 or 4, FlexAttention, or torch's choice. auto: the fastest measured."""

    epilogues: Literal["torch", "quack", "auto"] = "torch"
    """Run GELU, SwiGLU, GeGLU and their gradients separately, or inside QuACK's products (pip install quack-kernels).
    auto: inside where that was measured faster."""

    loss_chunks: int | Literal["auto"] = "auto"
    """Compute logits and loss in N chunks of tokens, to save memory. auto: chunks of about 1 GiB of logits."""

    loss_rows: Literal["auto", "all", "counted"] = "auto"
    """Compute logits of all tokens, or only of the ones whose label counts. auto: all; `capture` in one process takes
    counted if at most two thirds of the labels in its batch count."""

    tiles: int | Literal["auto"] = "auto"
    """Compute MLPs, norms and projections in N tiles of the sequence, and again in backward, to save memory. auto: 1,
    or with --memory peak= as many as needed."""

    fp8: Literal["off", "tensorwise", "rowwise", "rowwise-bf16-weight-gradients"] = "off"
    """Run linear layers in fp8, with one scale per matrix or per row; heads and routers stay in bf16."""

    fp8_skip: tuple[str, ...] = ()
    """Keep linear layers in bf16, by a pattern of their module paths, as in layers.0.*"""

    fp8_experts: bool = False
    """With --fp8, run expert products in fp8 too, with one scale per row."""

    reshard: Literal["auto", "always", "never"] = "auto"
    """Gather parameters again in backward instead of keeping them. auto: only if they would not fit in memory."""

    async_tp: bool = False
    """Overlap the collectives of tensor parallelism with matrix products, chunk by chunk; within one machine."""

    copy_engines: bool = False
    """Gather parameters and reduce gradients with copy engines instead of NCCL's kernels; within one machine."""

    cuda_graph: bool = True
    """Replay the whole step as one CUDA graph. No effect on a CPU."""

    @property
    def may_offload_optimizer(self) -> bool:
        """Whether the optimizer's state, or as much of it as a memory peak needs, may move to the host."""
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
    """Steps between text samples, a multiple of --val-every; one more at the end of the run. 0: none."""

    sample_prompt: str = ""
    """Prompt of the samples; in a run on conversations, a user message. Empty: the start of a document."""

    checkpoint_every: int = 50
    """Steps between checkpoints. 0: only at the end."""

    save: Literal["auto", "behind", "wait"] = "auto"
    """behind: train while a copy of the state in host memory is written. wait: wait for the write. auto: by device."""

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
    """Compare the captured step with eager before the first step; with --passes exact, any difference ends the run."""

    profile: str | None = None
    """Trace these steps, as in 10:13 (10, 11 and 12), for Perfetto, and put measured times on the run's page."""

    memory_snapshot: bool = False
    """Record the GPU's allocations in the first steps, for torch's memory viewer: memory_snapshot.pickle."""

    saved_steps: str = "auto"
    """Folder to load the compiled step from, or save it to. auto: your cache. off: neither."""

    out: Path | None = None
    """Run folder, new or empty (compile: the folder for the saved step). Default: runs/PRESET-UTC_TIME."""

    resume: Path | None = None
    """Continue the run in this folder, or from RUN/checkpoints/step-N, with the defaults of its config.json."""

    init_from_hf: Path | None = None
    """Start from this Hugging Face checkpoint, a folder or a name on the Hub; without PRESET, with its model."""

    lora: str | None = None
    """Train a peft adapter, as in r=16,alpha=32,targets=all-linear (or q_proj+experts); dropout=0.1, dora and
    rslora may follow. Default: train all weights."""

    quantize: Literal["nf4", "fp8"] | None = None
    """With --lora, store frozen linear layers in bitsandbytes' 4 bits (QLoRA), or in fp8. Default: not quantized."""

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
