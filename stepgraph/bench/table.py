"""The tables of ``stepgraph bench``: aligned for a terminal, and Markdown as they are."""

from collections.abc import Sequence
from typing import Any

from stepgraph.bench.results import Row


def section(model: str, env: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]) -> str:
    """Everything about one model: heading, table, and what one must know to read it. ``rows``: that model's."""
    chosen = settings["models"][model]
    lines = [f"### {title(model, settings)}", "", where(env, settings), "", *table(chosen, rows), ""]
    lines += [f"- {note}" for note in _notes(settings, chosen, rows)]
    return "\n".join(lines) + "\n"


def title(model: str, settings: dict[str, Any]) -> str:
    """The model and its batch, such as ``golf, batch 32 x 2048, bf16``."""
    chosen = settings["models"][model]
    return f"{model}, batch {chosen['batch_size']} x {chosen['seq_len']}, {chosen['precision']}"


def where(env: dict[str, Any], settings: dict[str, Any]) -> str:
    """The device and the versions in one line."""
    versions, threads = env["versions"], env["torch_threads"]
    device = env["gpus"][0] if settings["device"] == "cuda" else f"{env['cpu']}, {threads} thread{'s' * (threads != 1)}"
    tail = f", CUDA {versions['cuda']}" if settings["device"] == "cuda" else ""
    return f"{device}; torch {versions['torch']}, stepgraph {versions['stepgraph']}{tail}"


def best_compile(rows: Sequence[Row]) -> Row | None:
    """The fastest mode of ``torch.compile`` that ran."""
    modes = [row for row in rows if row.provider.startswith("compile") and row.step_ms]
    return min(modes, key=lambda row: row.step_ms, default=None)


def table(chosen: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """The lines of the table: a row a provider, numbers to the right."""
    best, eager = best_compile(rows), next((row for row in rows if row.provider == "eager" and row.step_ms), None)
    columns = ["provider", "step ms", "vs compile", "vs eager", "tokens/s", "peak GiB", "loss"]
    cells = [
        [
            row.provider,
            f"{row.step_ms:.4g}" if row.step_ms else "failed",
            _times_faster(row, best),
            _times_faster(row, eager),
            f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "",
            f"{row.peak_mem_gib:.2f}" if row.peak_mem_gib is not None else "",
            f"{row.loss:.4f}" if row.loss is not None else "",
        ]
        for row in rows
    ]
    if any(row.step_mem_gib is not None for row in rows):  # CPU
        columns.insert(-1, "step MiB")
        for row, line in zip(rows, cells, strict=True):
            line.insert(-1, f"{1024 * row.step_mem_gib:.0f}" if row.step_mem_gib is not None else "")
    if any(row.host_ms is not None for row in rows):  # CUDA
        columns += ["host ms", "TFLOP/s", "MFU"]
        for row, line in zip(rows, cells, strict=True):
            flops = row.tokens_per_s * chosen["flops_per_token"] if row.tokens_per_s else None
            line.append(f"{row.host_ms:.3g}" if row.host_ms is not None else "")
            line.append(f"{flops / 1e12:.0f}" if flops else "")
            line.append(f"{flops / chosen['peak_flops']:.1%}" if flops and chosen["peak_flops"] else "")
    return align(columns, cells)


def _times_faster(row: Row, than: Row | None) -> str:
    return f"{than.step_ms / row.step_ms:.2f}x" if than and row.step_ms else ""


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
    turns = "providers take turns" if settings["device"] == "cpu" else "one provider after another"
    if settings["device"] != "cpu" and together > 1:
        turns = f"{together} providers built together take turns"
    notes = [f"step ms: median of {repeats} repeats, each the median of {steps} steps; {turns}, a process each"]
    if best:
        notes.append(f"vs compile: times as fast as the best torch.compile mode measured ({best.provider})")
    if settings["device"] == "cpu":
        notes.append("peak GiB: the process, its compiler included; step MiB: tensors alive in a step and not after it")
    notes.append(chosen["losses"])
    notes += [f"{row.provider} failed: {row.error}" for row in rows if row.error]
    for row in rows:
        if row.fwd_ms is not None:
            notes.append(f"{row.provider}, timed apart: forward {row.fwd_ms:.4g} ms, backward {row.bwd_ms:.4g} ms")
        if row.rms_norm_kernels:
            notes.append(f"eager's RMSNorm ran {', '.join(row.rms_norm_kernels)}")
    return notes
