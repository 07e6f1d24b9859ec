"""How a forecast's tables look: columns, sizes and times."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from stepgraph.costs.hardware import ATTENTION_REACHED, MEMORY_REACHED, PRODUCTS_REACHED, Gpu

_PIPE_WIDTH = 1000


def new_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table; the columns ``words`` are aligned left, ``numbers`` right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 0)
    for column in words:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", overflow="fold")
    return table


def new_console() -> Console:
    """Standard output. A pipe has no width, so tables there are as wide as they are; a terminal folds long cells."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    return console


def assumed_rates(gpu: Gpu) -> str:
    """What a forecast for ``gpu`` assumes of its kernels."""
    return (
        f"Forecast for {gpu.name}; nothing was run. Matrix products at {PRODUCTS_REACHED:.0%} of the published FLOP/s, "
        f"attention at its kernels' rates (else {ATTENTION_REACHED:.0%}), other kernels at {MEMORY_REACHED:.1%} of the "
        "memory bandwidth, all measured on H200."
    )


def size_text(size: float) -> str:
    """Bytes in the largest binary unit that fits."""
    power = next((p for p in (3, 2, 1) if size >= 2 ** (10 * p)), 0)
    return f"{size / 2 ** (10 * power):,.{2 if power == 3 else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def time_text(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
