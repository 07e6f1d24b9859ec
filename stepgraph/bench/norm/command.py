"""``stepgraph bench norm``: RMS norm and layer norm by each provider and shape, in one process."""

import importlib.metadata
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from stepgraph.bench.harness import provider_names
from stepgraph.bench.norm.providers import OPS, PROVIDERS, Provider
from stepgraph.bench.norm.results import ITEM_BYTES, OURS, NormRow, norm_section
from stepgraph.bench.norm.timing import (
    calls_in_graph,
    check_backward,
    check_forward,
    copy_gbps,
    graph_ms,
    make_inputs,
    wall_ms,
)
from stepgraph.bench.results import in_one_line, write
from stepgraph.compat import keep_saved_tensors
from stepgraph.config.command_line import parse, require_folder
from stepgraph.config.commands import NormBench
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment
from stepgraph.passes.waiting import Waiting

Tensor = torch.Tensor
Shape = tuple[int, int]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIRECTIONS = ("fwd", "bwd")

RANDOM_SHAPES = 120
#: The most bytes of a drawn tensor on a CPU.
CPU_BYTES = 2**19


class NormOptions(NormBench):
    """The options, and what they mean on a device."""

    def ops(self) -> tuple[str, ...]:
        return OPS if self.op == "both" else (self.op,)

    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.direction == "both" else (self.direction,)

    def names(self) -> list[str]:
        """The providers, in order. Raises ValueError for an unknown one."""
        return provider_names(self.providers, PROVIDERS)

    def shape_list(self, device: torch.device) -> list[Shape]:
        """(M, N) of each shape. Raises ValueError for anything but a list of shapes."""
        if self.shapes == "random":
            return _random(ITEM_BYTES[self.dtype], device)
        shapes = []
        for word in self.shapes.split(","):
            numbers = word.strip().split("x")
            if len(numbers) != 2 or not all(
                number.isascii() and number.isdigit() and int(number) for number in numbers
            ):
                raise ValueError(
                    f"shapes={self.shapes}: {word.strip()!r} is not ROWSxLENGTH, two numbers above 0; "
                    "write for example --shapes 12288x2880,65536x256, or --shapes random"
                )
            shapes.append((int(numbers[0]), int(numbers[1])))
        return list(dict.fromkeys(shapes))


def _most(device: torch.device) -> int:
    """Bytes of the largest tensor that fits a measurement on this GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return free // 16  # two calls, each with x, dy, y and dx, and what a provider needs besides


def _random(item_bytes: int, device: torch.device) -> list[Shape]:
    """Shapes of 128 KiB to 1 GiB a tensor; row lengths in turn multiples of 128, of 8, and any, from 64 to 131072."""
    draw, shapes = random.Random(0), []
    while len(shapes) < RANDOM_SHAPES:
        multiple = (128, 8, 1)[len(shapes) % 3]
        n = round(2 ** draw.uniform(6, 17) / multiple) * multiple
        m = round(2 ** draw.uniform(17, 30) / (n * item_bytes))
        if 64 <= n <= 131072 and m:
            shapes.append((m, n))
    most = CPU_BYTES if device.type == "cpu" else _most(device)
    return [(m, n) for m, n in shapes if m * n * item_bytes <= most]


def main(argv: list[str]) -> int:
    """Measures and reports; 1 if one of our results is wrong or missing. What is wrong with others is only reported."""
    text = f"{NormOptions.__doc__} Providers: {', '.join(PROVIDERS)}."
    (options,) = parse(argv, "stepgraph bench norm", NormOptions(), description=text)
    device = pick_device(options.device)
    require_folder(options.json)
    run = Run(options, device)
    # A stream of its own: a graph cannot be captured on the default one, and a backward runs where its forward did.
    with torch.cuda.stream(torch.cuda.Stream() if device.type == "cuda" else None), keep_saved_tensors():
        run.run()
    print(norm_section(run.env, run.settings, run.rows))
    return int(any(row.provider == OURS and not row.ms for row in run.rows))


class Run:
    """The measurement. ``env``, ``settings`` and ``rows`` are the record, complete after every shape."""

    def __init__(self, options: NormOptions, device: torch.device):
        self.start = time.perf_counter()
        self.options, self.device, self.dtype = options, device, DTYPES[options.dtype]
        self.timing = "graph" if device.type == "cuda" else "wall"
        self.shapes = options.shape_list(device)
        names = options.names()
        missing = {name: reason for name in names if (reason := missing_reason(PROVIDERS[name], device))}
        self.names = [name for name in names if name not in missing]
        self.rows: list[NormRow] = []
        self.env = environment()
        self.settings: dict[str, Any] = {
            "benchmark": "norm",
            "device": device.type,
            "dtype": options.dtype,
            "timings": [self.timing],
            "providers": self.names,
            "missing": missing,
            "packages": _versions(PROVIDERS[name].package for name in self.names),
            "copy_gbps": [],
            "budget_s": options.budget,
            "seconds": 0.0,
            "left_out": [f"{m}x{n}" for m, n in self.shapes],
        }

    def run(self) -> None:
        """All shapes that the budget allows."""
        torch.manual_seed(0)
        self.settings["copy_gbps"].append(copy_gbps(self.device))
        self._say(f"copy: {self.settings['copy_gbps'][0]:.0f} GB/s")
        for number, shape in enumerate(self.shapes, start=1):
            if self.options.budget is not None and self._seconds() > self.options.budget:
                break
            self.rows += self._shape(*shape)
            self.settings["left_out"].remove(f"{shape[0]}x{shape[1]}")
            self._write()
            self._say(f"{number} of {len(self.shapes)}: {shape[0]}x{shape[1]} done")
        self.settings["copy_gbps"].append(copy_gbps(self.device))
        self._write()

    def _shape(self, m: int, n: int) -> list[NormRow]:
        """Every provider on one shape."""
        sets = calls_in_graph(m * n * self.dtype.itemsize) if self.timing == "graph" else 1
        inputs = [make_inputs(m, n, self.dtype, self.device) for _ in range(sets)]
        rows = []
        for op in self.options.ops():
            params = self._params(op, n)
            for name in self.names:
                with Waiting(self._say, f"{op} {m} x {n}, {name}"):
                    rows += self._provider(name, op, params, inputs)
        return rows

    def _params(self, op: str, n: int) -> list[torch.nn.Parameter]:
        count = 2 if op == "layer_norm" else 1
        values = (0.1 * torch.randn(n, device=self.device) + 1 for _ in range(count))
        return [torch.nn.Parameter(value.to(self.dtype)) for value in values]

    def _provider(
        self, name: str, op: str, params: list[torch.nn.Parameter], inputs: list[tuple[Tensor, Tensor]]
    ) -> list[NormRow]:
        (m, n), rows = inputs[0][0].shape, []
        provider: Provider | None = None
        for direction in self.options.directions():
            what = {"op": f"{op} {direction}", "m": m, "n": n, "dtype": self.options.dtype, "provider": name}
            row = NormRow(**what, timing=self.timing)
            rows.append(row)
            try:
                provider = provider or PROVIDERS[name](op, *params)
                row.wrong = self._check(provider, op, direction, *inputs[0])
                if not row.wrong:
                    row.set_time(self._time(provider, direction, inputs), self.settings["copy_gbps"][0])
            except Exception as error:  # another package's code may raise anything; the others continue
                row.error = None if row.ms else in_one_line(error)
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # raises, and ends the run, if the failure has broken the device's context
                torch.cuda.empty_cache()
        return rows

    def _check(self, provider: Provider, op: str, direction: str, x: Tensor, dy: Tensor) -> str | None:
        params = [p.detach() for p in provider.params]
        if direction == "fwd":
            return check_forward(op, x, params, provider.forward(x))
        return check_backward(op, x, params, dy, provider.backward(provider.saved(x), x, dy.clone()))

    def _time(self, provider: Provider, direction: str, inputs: list[tuple[Tensor, Tensor]]) -> float:
        if self.timing == "wall":
            return wall_ms(next(self._calls(provider, direction, inputs[:1])))
        touched = 2 * len(inputs) * inputs[0][0].nbytes
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        flush = torch.zeros(3 * l2 // 4, dtype=torch.int32, device=self.device) if touched < 3 * l2 else None
        return graph_ms(list(self._calls(provider, direction, inputs)), flush)

    def _calls(
        self, provider: Provider, direction: str, inputs: list[tuple[Tensor, Tensor]]
    ) -> Iterator[Callable[[], Any]]:
        for x, dy in inputs:
            if direction == "fwd":
                yield partial(provider.forward, x)
            else:
                dy = dy.clone() if provider.overwrites_dy else dy
                yield partial(provider.backward, provider.saved(x), x, dy)

    def _seconds(self) -> float:
        return time.perf_counter() - self.start

    def _write(self) -> None:
        self.settings["seconds"] = round(self._seconds(), 1)
        if self.options.json is not None:
            write(self.options.json, self.env, self.settings, self.rows)

    def _say(self, text: str) -> None:
        """Print the progress; on stderr, so that stdout holds only the result."""
        print(f"{self._seconds():7.1f} s | {text}", file=sys.stderr, flush=True)


def missing_reason(provider: type[Provider], device: torch.device) -> str | None:
    """Why ``provider`` cannot run here, or None."""
    if provider.package and importlib.util.find_spec(provider.package) is None:
        return f"{provider.package} is not installed"
    return "needs a GPU" if provider.needs_cuda and device.type == "cpu" else None


def _versions(packages: Any) -> dict[str, str]:
    """Versions of what is installed to import each of ``packages``: a distribution may have another name."""
    owners = importlib.metadata.packages_distributions()
    found = [owner for package in packages if package for owner in owners.get(package, [])]
    return {owner: importlib.metadata.version(owner) for owner in dict.fromkeys(found)}
