"""The record per provider of every training-step benchmark, and its tables in aligned Markdown."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Seconds between two lines about a provider that is waited for.
SPEAKS_EVERY_S = 30.0


@dataclass(kw_only=True)
class ProviderRow:
    """One model under one provider. What was not or cannot be measured is null."""

    model: str
    """Name of the preset, or of the model."""
    provider: str
    """A name of the benchmark's ``PROVIDERS``."""
    step_ms: float | None = None
    """Median time of a step, ms."""
    step_ms_all: list[float] = dataclasses.field(default_factory=list)
    """What that is the median of, ms: the median step of each repeat, or each step, on its slowest rank."""
    peak_mem_gib: float | None = None
    """CUDA: most memory that torch's allocator reserved, GiB; of ``bench model`` since the model was built. CPU: growth
    of the process's peak resident memory since then, or since its imports; compilers included. ``bench train``: see
    `TrainRow`."""
    losses: list[float | None] = dataclasses.field(default_factory=list)
    """Losses that are compared, nats per token; null where not finite."""
    first_step_s: float | None = None
    """To the end of the first step, s, capture and compilation included: from the built model, over ranks from the
    start of the processes."""
    capture_s: float | None = None
    """stepgraph: capture and passes, s, compilers left out."""
    compile_s: float | None = None
    """stepgraph: compilers and recording of CUDA graphs, s. Others that compile: the first step, less a step."""
    passes: list[str] | None = None
    """stepgraph: what each pass did, line by line."""
    versions: dict[str, Any] | None = None
    """Versions of packages in the provider's process."""
    unavailable: str | None = None
    """Why the provider was not measured, in one line: it is not installed, or cannot do this work. No failure."""
    error: str | None = None
    """Why it failed, in one line. Figures taken before are kept."""
    disagreement: str | None = None
    """Which loss is not that of the provider compared with, in one line."""


@dataclass(kw_only=True)
class Row(ProviderRow):
    """One model under one provider of ``bench step`` or ``bench model``. What was not or cannot be measured is null."""

    host_ms: float | None = None
    """CUDA: time until the call of a step returns, ms, from an idle device."""
    tokens_per_s: float | None = None
    """``bench step``: tokens per second at ``step_ms``."""
    step_mem_gib: float | None = None
    """CPU: most bytes of tensors that a step has alive beyond those alive between steps, GiB."""
    loss: float | None = None
    """Loss of the first step, nats per token."""
    spread: list[float] | None = None
    """eager: how far each of ``losses`` moves, as a share of it, by rounding alone; the most of a few trials."""
    per_s: float | None = None
    """``bench model``: tokens, of ViT images, per second at ``step_ms``."""
    peak_allocated_gib: float | None = None
    """CUDA: the same as ``peak_mem_gib``, of tensors alive."""
    params: int | None = None
    """Parameters of the model, tied ones once."""
    cuda_graphs: str | None = None
    """stepgraph on CUDA: how many CUDA graphs the step is, and how many nodes stay on the host."""
    where: dict[str, dict[str, float]] | None = None
    """``bench model``, stepgraph on CUDA: ``ms`` of a step by kind of kernel, and ``limit``, ms of its products and
    attention at the rates measured on such a GPU."""
    profile_error: str | None = None
    """Why there is no ``where``, in one line; the other figures are right."""
    notes: list[str] | None = None
    """stepgraph: what else passes noted, at most 20 lines."""


def note(row: ProviderRow, text: str) -> None:
    """Print how far the provider of ``row`` is; on stderr, so that stdout holds only the result."""
    print(f"{row.model} | {row.provider} | {text}", file=sys.stderr, flush=True)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the ``values`` that are not None; None if there is none."""
    found = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def in_markdown(
    model: str,
    env: dict[str, Any],
    settings: dict[str, Any],
    columns: Mapping[str, Callable[[Any], str]],
    rows: Sequence[ProviderRow],
    notes: Sequence[str],
    last: str | None = None,
) -> str:
    """One model: heading, device, a table with a row a provider, notes and the last line. ``columns``: name -> text."""
    cells = [[show(row) for show in columns.values()] for row in rows]
    lines = [f"### {title(model, settings)}", "", where(env, settings), "", *align([*columns], cells), ""]
    return "\n".join(lines + [f"- {note}" for note in notes] + ([] if last is None else ["", last])) + "\n"


def shown(name: str, form: str, scale: float = 1) -> Callable[[ProviderRow], str]:
    """What a column shows: the figure ``name`` of a row, nothing where the row has none."""

    def show(row: ProviderRow) -> str:
        value = getattr(row, name)
        return "" if value is None else format(scale * value, form)

    return show


def step_ms(row: ProviderRow) -> str:
    """The step's time, or why there is none, in a word."""
    return f"{row.step_ms:.4g}" if row.step_ms else "unavailable" if row.unavailable else "failed"


def times_faster(than: ProviderRow | None) -> Callable[[ProviderRow], str]:
    """What a column shows: how many times as fast as the row ``than`` each is."""
    return lambda row: f"{than.step_ms / row.step_ms:.2f}x" if than and row.step_ms else ""


def of_eager(rows: Sequence[Row]) -> Row | None:
    """Eager's row, where it has a time."""
    return next((row for row in rows if row.provider == "eager" and row.step_ms), None)


def problems_of(rows: Sequence[ProviderRow]) -> list[str]:
    """Why providers have no figures."""
    found = [f"{row.provider}: {row.unavailable}" for row in rows if row.unavailable]
    return found + [f"{row.provider} failed: {row.error}" for row in rows if row.error]


def section(model: str, env: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]) -> str:
    """Everything about one model: heading, table, and what one must know to read it. ``rows``: that model's."""
    chosen, best, cuda = settings["models"][model], best_compile(rows), settings["device"] == "cuda"
    columns = {
        "provider": lambda row: row.provider,
        "step ms": step_ms,
        "vs compile": times_faster(best),
        "vs eager": times_faster(of_eager(rows)),
        "tokens/s": shown("tokens_per_s", ",.0f"),
        "peak GiB": shown("peak_mem_gib", ".2f"),
    }
    if not cuda:
        columns["step MiB"] = shown("step_mem_gib", ".0f", 1024)
    columns["loss"] = shown("loss", ".4f")
    if cuda:
        flops, peak = chosen["flops_per_token"], chosen["peak_flops"]
        columns["host ms"] = shown("host_ms", ".3g")
        columns["TFLOP/s"] = shown("tokens_per_s", ".0f", flops / 1e12)
        columns["MFU"] = shown("tokens_per_s", ".1%", flops / peak) if peak else lambda row: ""
    return in_markdown(model, env, settings, columns, rows, _notes(settings, chosen, rows))


def title(model: str, settings: dict[str, Any]) -> str:
    """The model, mesh and batch: ``golf, batch 32 x 2048, bf16``, or ``llama3-8b, fsdp=2,tp=2, batch 1 x 8192 per
    data-parallel rank, bf16``."""
    chosen = settings["models"][model]
    microbatches = f"{chosen['accumulate']} x " if chosen.get("accumulate", 1) > 1 else ""
    target = f" + {chosen['target_len']}" if chosen.get("target_len") else ""
    per = " per data-parallel rank" if "mesh" in chosen else ""
    parts = [
        *(model, chosen.get("mesh")),
        f"batch {microbatches}{chosen['batch_size']} x {chosen['seq_len']}{target}{per}",
        chosen.get("precision", "bf16"),
        f"LoRA of rank {chosen['lora']}" if chosen.get("lora") else "",
        "" if chosen.get("fp8", "off") == "off" else f"fp8 {chosen['fp8']}",
        f"pipeline {chosen['pipeline']}" if chosen.get("pipeline") else "",
        "balanced routing" if chosen.get("balanced_routing") else "",
    ]
    return ", ".join(filter(None, parts))


def where(env: dict[str, Any], settings: dict[str, Any]) -> str:
    """The devices and the versions in one line."""
    versions, threads, cuda = env["versions"], env["torch_threads"], settings["device"] == "cuda"
    device = env["gpus"][0] if cuda else f"{env['cpu']}, {threads} thread{'s' * (threads != 1)}"
    ranks = f"{settings['ranks']} {'x' if cuda else 'ranks on'} " if "ranks" in settings else ""
    tail = f", CUDA {versions['cuda']}" if cuda else ""
    tail += f", transformers {settings['transformers']}" if "transformers" in settings else ""
    return f"{ranks}{device}; torch {versions['torch']}, stepgraph {versions['stepgraph']}{tail}"


def best_compile(rows: Sequence[Row]) -> Row | None:
    """The fastest mode of ``torch.compile`` that ran."""
    modes = [row for row in rows if row.provider.startswith("compile") and row.step_ms]
    return min(modes, key=lambda row: row.step_ms, default=None)


def align(columns: list[str], cells: list[list[str]]) -> list[str]:
    """A Markdown table, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(words: list[str]) -> str:
        first, *others = zip(words, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(word.rjust(width) for word, width in others)]) + " |"

    return [line(columns), line(rule), *map(line, cells)]


def _notes(settings: dict[str, Any], chosen: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    best = best_compile(rows)
    steps, repeats = settings["steps"], settings["repeats"]
    together = settings.get("together", 1)  # records from before that option lack it
    turns = "providers interleaved" if settings["device"] == "cpu" else "one provider after another"
    if settings["device"] != "cpu" and together > 1:
        turns = f"{together} providers built together, interleaved"
    of = f"{repeats} repeat{'s' * (repeats != 1)}"
    notes = [f"step ms: median of {of}, each the median of {steps} steps; {turns}, one process per provider"]
    if best:
        notes.append(f"vs compile: times as fast as the best torch.compile mode measured ({best.provider})")
    if settings["device"] == "cpu":
        notes.append("peak GiB: the process, its compiler included; step MiB: tensors alive in a step and not after it")
    notes.append(chosen["losses"])
    return notes + problems_of(rows)
