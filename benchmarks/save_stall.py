"""How long training stands still for a checkpoint: `stepgraph train`, whose process is ended once its save is known.

One GPU holds here what each of two holds of llama3-8b under ``fsdp=2``: 14 layers have 4.10B parameters, and these and
AdamW's two moments in fp32 are 49 GB, where half of 8.03B are 48 GB.

    python benchmarks/save_stall.py llama3-8b --model.n-layers 14 --mesh fsdp=1 --touch-gib 100 --json FILE
    python benchmarks/save_stall.py llama3-debug --device cpu --save-at 6          # that it runs

Options that are not below go to `stepgraph train`. A row, of ``--rows``, is a run:

- ``behind``: the save of step ``--save-at``, `--save behind`, when its host memory was taken ahead.
- ``unprepared``: the same at the second step, before any memory is taken ahead: the save takes it, and waits.
- ``wait``: `--save wait`, the run waits until the checkpoint is on the disk.

``stall_s``: what the run says that it waited. ``gap_s``: the same from outside, from the line of the step before the
save to that of the next, without a step. ``step_ms``: median and largest of the steps while host memory was taken
(``taking``), then before the save, while it was written (``during``), and ``after``. ``whole_s``: from the save's begin
until the checkpoint had its name; null if that took longer than ``--whole-s``, after which the run is ended.
``checkpoint_bytes``: of all its files. ``copies_gib``, ``copies_s``: host memory for the copies, and the seconds until
it was there. ``host``: the most that the process had resident (page-locked memory may not count there), and the memory
available on the machine before the run and at least. ``gpu_gib``: peak allocated until the save, and until the end.
``first_step_s``: from the start to the end of the first step. ``ended``: of a run that ended by itself behind its save,
as on a full disk, its last words.

Where a virtual machine is given its memory only as it is touched, the first use of each page is slow (3 s for 8 GiB, on
one): ``--touch-gib`` lets child processes touch so much of it first, so that this is not measured. The folder needs the
disk space of one checkpoint; ``--folder`` says where it is made.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from stepgraph.config.environment import environment

ROOT = Path(__file__).parents[1]
#: The step from which on steps are timed, and memory is taken ahead: the first compile and record CUDA graphs.
FIRST = 3
#: Steps that a row goes on for after its save is known.
MORE = 4
TOUCHING = "import sys, numpy; a = numpy.ones(int(sys.argv[1]), numpy.uint8); print('touched', flush=True); input()"
CHILDREN = 4


def touch(gib: float) -> float:
    """Touch memory of the machine, all of it at once, and give it back; the seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-c", TOUCHING, str(int(gib * 2**30 / CHILDREN))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(CHILDREN)]
    for child in children:
        child.stdout.readline()
    for child in children:
        child.communicate("\n")
    if any(child.returncode for child in children):
        raise RuntimeError(f"{gib} GiB could not be touched")
    return time.perf_counter() - began


def available() -> float:
    """GiB of host memory."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) / 2**20


class Row:
    """A run and what is seen of it: lines and when they came, and memory."""

    def __init__(self, kind: str, words: list[str], save_at: int, folder: Path, limits: tuple[float, float]):
        self.kind, self.step = kind, {"behind": save_at, "unprepared": FIRST - 1, "wait": FIRST}[kind]
        self.run, (self.whole_limit, self.limit) = folder / "run", limits
        save = ["--save", "wait" if kind == "wait" else "behind", "--checkpoint-every", str(self.step)]
        records = ["--val-every", "0", "--log-every", "1", "--steps", "100000", "--warmup-steps", "2000"]
        self.words = ["train", *words, *records, *save, "--out", str(self.run)]
        self.said: list[str] = []
        self.came: dict[int, float] = {}  # when the line of a step came
        self.ready_at = self.whole_at = 0  # the newest step when memory was ready, and when the checkpoint was whole
        self.resident = 0.0
        self.before = self.least = available()

    def measure(self) -> dict[str, Any]:
        """Run until all is known. Raises ``RuntimeError`` with what it printed if it ends before."""
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "stepgraph", *self.words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # compilers have processes of their own, which end with it
            env=os.environ | {"PYTHONPATH": paths},
        )
        timer = threading.Timer(self.limit, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            known = any(self._hears(line, process.pid) for line in process.stdout)
            found = self._found(early=not known) if max(self.came, default=0) > self.step else None
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if found is None:
            raise RuntimeError(f"{self.kind}: it ended before its save was known:\n" + "".join(self.said)[-6000:])
        return found

    def _hears(self, line: str, pid: int) -> bool:
        """Note a line of the run; whether all is known."""
        self.said.append(line)
        now = time.perf_counter()
        newest = max(self.came, default=0)
        if found := re.match(r"step +(\d+)/", line):
            newest = int(found[1])
            self.came[newest] = now
        elif line.startswith("host memory for copies"):
            self.ready_at = newest
        elif line.startswith(f"checkpoint of step {self.step}:"):
            self.whole_at = newest
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            self.resident = max(self.resident, int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**20)
        except (OSError, TypeError):
            pass  # it has ended
        self.least = min(self.least, available())
        saved = newest > self.step
        if self.kind != "behind":
            return saved
        late = saved and now - self.came[self.step] > self.whole_limit
        return late or (self.whole_at > 0 and newest >= self.whole_at + MORE)

    def _found(self, early: bool) -> dict[str, Any]:
        """The row. ``early``: the run ended by itself once it had saved, as on a full disk, or took too long."""
        records = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        steps = {record["step"]: record for record in records if "step_ms" in record}
        (stall,) = [record["save_s"] for record in records if "save_s" in record and record["step"] == self.step]
        ready, whole, end = max(self.ready_at, FIRST - 1), self.whole_at or max(steps), max(steps)
        if self.kind == "behind" and (not self.ready_at or ready > self.step):
            print(f"note: memory was not ready at step {self.step}: choose a later --save-at", flush=True)
        parts = {
            "taking": (FIRST, min(ready, self.step)),
            "before": (ready + 1, self.step),
            "during": (self.step + 1, whole),
            "after": (whole + 1, end),
        }
        times = {
            name: [steps[step]["step_ms"] for step in range(low, high + 1) if step in steps]
            for name, (low, high) in (parts.items() if self.kind == "behind" else ())
        }
        usual = statistics.median(steps[step]["step_ms"] for step in steps if step >= FIRST) / 1e3
        said = "".join(self.said)
        copies = re.search(r"host memory for copies of the state: ([\d.]+) GiB, ready after ([\d.]+) s", said)
        written = re.search(rf"checkpoint of step {self.step}: the run waited [\d.]+ s, written in ([\d.]+) s", said)
        whole_s = stall if self.kind == "wait" else float(written[1]) if written else None
        files = list((self.run / "checkpoints" / f"step-{self.step:08d}").glob("*")) if whole_s else []
        return {
            "row": self.kind,
            "step": self.step,
            "params": int(re.search(r"model ([\d,]+) parameters", said)[1].replace(",", "")),
            "checkpoint_bytes": sum(file.stat().st_size for file in files) or None,
            "stall_s": stall,
            "gap_s": self.came[self.step + 1] - self.came[self.step] - usual,
            "whole_s": whole_s,
            "step_ms": {
                name: {"median": statistics.median(ms), "largest": max(ms), "steps": len(ms)}
                for name, ms in times.items()
                if ms
            },
            "copies_gib": float(copies[1]) if copies else None,
            "copies_s": float(copies[2]) if copies else None,
            "host": {
                "resident_gib": self.resident,
                "available_gib": {"before": self.before, "least": self.least},
            },
            "gpu_gib": None
            if "cpu" in self.words
            else {"until_save": steps[self.step]["mem_gib"], "until_end": steps[end]["mem_gib"]},
            "first_step_s": self.came[1] - self.began,
            "seconds": self.came[end] - self.began,
            "ended": "".join(self.said[-3:]).replace(str(self.run), "RUN") if early else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", nargs="+", choices=["behind", "unprepared", "wait"], default=["behind", "unprepared"])
    parser.add_argument("--save-at", type=int, default=40)
    parser.add_argument("--touch-gib", type=float, default=0)
    parser.add_argument("--whole-s", type=float, default=120)
    parser.add_argument("--limit-s", type=float, default=300, help="a row that takes longer is ended, and fails")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options, words = parser.parse_known_args()
    record: dict[str, Any] = {"words": words, "touched_gib": options.touch_gib, "touch_s": None, "rows": []}
    if options.touch_gib:
        record["touch_s"] = touch(options.touch_gib)
        print(f"touched {options.touch_gib:g} GiB in {record['touch_s']:.1f} s", flush=True)
    for kind in options.rows:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = Row(kind, words, options.save_at, Path(folder), (options.whole_s, options.limit_s))
            record["rows"].append(row.measure())
        print(json.dumps(record["rows"][-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"environment": environment(), **record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
