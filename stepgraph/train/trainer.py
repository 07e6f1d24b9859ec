"""The story of a run, top to bottom: data, model, capture, steps, records."""

import dataclasses
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import stepgraph
from stepgraph import passes
from stepgraph.capture import trace_step
from stepgraph.models import flops_per_token, num_params
from stepgraph.train import build
from stepgraph.train.checkpoint import Checkpointer, resolve
from stepgraph.train.config import TrainConfig
from stepgraph.train.data import PackedLoader, open_data, unigram_entropy, validation_batches
from stepgraph.train.environment import environment
from stepgraph.train.hf_weights import save_hf
from stepgraph.train.metrics import Progress, RunFolder, Summary, format_seconds, mfu, peak_flops, peak_mem_gib
from stepgraph.train.schedule import lr_at

#: Steps not timed: the first runs plainly, the second records CUDA graphs.
WARMUP_STEPS = 2


def run(config: TrainConfig) -> int:
    """Train as ``config`` says; the exit status. Errors of use raise ``ValueError`` with one line."""
    config.validate()
    return Run(config).train()


@dataclass
class Done:
    """A step that was launched and whose results are still on the device."""

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    batch: dict[str, torch.Tensor]
    lr: float


class NotFiniteError(RuntimeError):
    """The loss of a step is not finite."""


class Run:
    """One training run: everything it holds, and the loop."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.started = time.perf_counter()
        self.device = build.pick_device(config.device)
        torch.manual_seed(config.seed)

        data = open_data(config.data, config.tokenizer)
        if data.tokenizer.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"the tokenizer has {data.tokenizer.vocab_size} tokens, the model {config.model.vocab_size}: "
                f"try --model.vocab-size {-(-data.tokenizer.vocab_size // 64) * 64}"
            )
        sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len}
        self.validation = validation_batches(data.source, data.tokenizer, n=config.val_batches, **sizes)
        self.loader = PackedLoader(
            data.source,
            data.tokenizer,
            batch_size=config.batch_size * config.accumulate,
            seq_len=config.seq_len,
            seed=config.seed,
        )
        self.unigram = unigram_entropy(data.source, data.tokenizer)

        self.model = build.build_model(config, self.device)
        self.optimizer = build.build_optimizer(config, self.model)
        self.loss_fn = build.build_loss(config, self.device)
        self.progress_state = {"step": 0}

        path = config.run_folder()
        checkpoint = resolve(path) if config.resume else None
        checkpointer = Checkpointer(path / "checkpoints", keep=config.keep_checkpoints)
        if checkpoint:
            checkpointer.load(checkpoint, self.state)
            if self.step >= config.steps:
                raise ValueError(
                    f"{path} already has {self.step} of {config.steps} steps; give more with --steps to go on"
                )
        self.folder = RunFolder(path, resume_step=self.step if checkpoint else None)
        self.checkpointer = checkpointer
        self.saved_step = self.step if checkpoint else None

        self.params = num_params(self.model)
        self.flops_per_token = flops_per_token(config.model, config.seq_len)
        self.peak = None
        if self.device.type == "cuda":
            self.peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
        self.finished = 0  # steps that this process has done
        self.times_ms: list[float] = []
        self.last_loss: float | None = None
        self.val_loss: float | None = None
        self.stop_signal: str | None = None

        print(f"stepgraph {stepgraph.__version__}, torch {torch.__version__}, {self._device_name()}")
        print(f"run folder {path}" + (f", resumed after step {self.step}" if checkpoint else ""))
        print(f"config {_config_line(config)}")
        print(f"data {data.description}; unigram entropy {self.unigram:.4f} nats")
        print(f"model {self.params:,} parameters, {config.tokens_per_step:,} tokens per step")
        self.folder.write_config(config)
        self.folder.write_environment(environment())

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return self.progress_state["step"]

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
            "trainer": self.progress_state,
        }

    def train(self) -> int:
        """Capture the step, run the steps, keep the records. The exit status."""
        status, error = "failed", None
        try:
            with self._stop_on_signals():
                batch = self._next_batch()
                self._capture(batch)
                self._steps(batch)
                if self.stop_signal is None or self.step == self.config.steps:
                    self._validate()
                    status = "finished"
                else:
                    status = "interrupted"
                self._save()
        except NotFiniteError as failure:
            error = str(failure)
        except torch.OutOfMemoryError as failure:
            error = self._out_of_memory(failure)
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            raise
        finally:
            self._close(status, error)
        if error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    def _capture(self, batch: dict[str, torch.Tensor]) -> None:
        start = time.perf_counter()
        dump = self.folder.graphs if self.config.dump_graphs else None
        self.captured = build.build_step(self.config, self.model, self.loss_fn, batch, self.optimizer, dump)
        self.capture_s = time.perf_counter() - start
        graph = self.captured.graph
        phases = ", ".join(f"{phase} {n:,}" for phase, n in graph.count_by_phase().items())
        print(f"graph captured in {graph.capture_s:.1f} s; nodes after passes: {phases}")
        print(passes.format_report(self.captured.report))
        print(f"ready after {self.capture_s:.1f} s, of it compile {self._compile_s():.1f} s")
        self.folder.write_graph(graph.text())
        self._write_passes()

    def _steps(self, batch: dict[str, torch.Tensor]) -> None:
        """Run steps. On a GPU, step n+1 is launched before step n's results are read, so that it never waits for the
        host."""
        config = self.config
        runs_ahead = self.device.type == "cuda"
        launched: Done | None = None
        last_time = time.perf_counter()
        with Progress(config.steps, start_step=self.step) as progress:
            while self.step < config.steps and self.stop_signal is None:
                lr = lr_at(self.step, config)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                loss = self.captured(batch)
                self.progress_state["step"] += 1
                previous = launched
                launched = Done(self.step, loss, self.captured.metrics.get("grad_norm"), batch, lr)
                if previous:
                    last_time = self._finish(previous, last_time, progress)
                validate = config.val_every and self.step % config.val_every == 0 and self.step < config.steps
                save = config.checkpoint_every and self.step % config.checkpoint_every == 0
                if validate or save or not runs_ahead:
                    last_time = self._finish(launched, last_time, progress)
                    launched = None
                if validate or save:
                    if validate:
                        progress.note(f"step {self.step} | val_loss {self._validate():.4f}")
                    if save and self.step < config.steps:
                        self._save()
                    last_time = time.perf_counter()
                if self.step < config.steps and self.stop_signal is None:
                    batch = self._next_batch()
            if launched:
                self._finish(launched, last_time, progress)
            if self.stop_signal:
                progress.note(f"{self.stop_signal}: stopping after step {self.step}; continue with --resume")
        self._write_passes()  # what the first steps compiled and recorded is known now

    def _finish(self, done: Done, last_time: float, progress: Progress) -> float:
        """Wait for a launched step, check its loss, and record it; the time at which it was done."""
        loss = done.loss.item()
        now = time.perf_counter()
        if not torch.isfinite(done.loss):
            path = self.folder.path / f"bad-batch-step-{done.step}.pt"
            torch.save({k: v.cpu() for k, v in done.batch.items()}, path)
            raise NotFiniteError(
                f"the loss of step {done.step} is {loss}; its batch is kept in {path}; continue from the last "
                "checkpoint with a lower --lr"
            )
        self.last_loss = loss
        step_ms = (now - last_time) * 1e3
        self.finished += 1
        if self.finished > WARMUP_STEPS:
            self.times_ms.append(step_ms)
        if done.step % self.config.log_every == 0 or done.step == self.config.steps:
            tokens_per_s = self.config.tokens_per_step / (step_ms / 1e3)
            record = {
                "loss": loss,
                "grad_norm": done.grad_norm.item() if done.grad_norm is not None else None,
                "step_ms": step_ms,
                "tokens_per_s": tokens_per_s,
                "mfu": mfu(tokens_per_s, self.flops_per_token, self.peak),
                "mem_gib": peak_mem_gib(self.device),
            }
            progress.update(done.step, **record)
            self.folder.log(done.step, **record, lr=done.lr, tokens=done.step * self.config.tokens_per_step)
        return now

    def _next_batch(self) -> dict[str, torch.Tensor]:
        batch = next(self.loader)
        if self.device.type == "cuda":
            batch = {k: v.pin_memory().to(self.device, non_blocking=True) for k, v in batch.items()}
        return batch

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean loss over the validation batches, run eagerly; recorded at the current step."""
        self.model.eval()
        losses = [
            self.loss_fn(self.model, {k: v.to(self.device) for k, v in b.items()}).item() for b in self.validation
        ]
        self.model.train()
        self.val_loss = statistics.fmean(losses)
        self.folder.log(self.step, val_loss=self.val_loss)
        return self.val_loss

    def _save(self) -> None:
        if self.saved_step != self.step:
            self.checkpointer.save(self.step, self.state)
            self.saved_step = self.step

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run after the step in flight; a second one ends it at once."""

        def stop(number: int, _frame: object) -> None:
            self.stop_signal = signal.Signals(number).name
            signal.signal(number, before[number])

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _out_of_memory(self, failure: torch.OutOfMemoryError) -> str:
        """One line: what was asked for, and which memory policy would fit by the graph's estimate."""
        asked = next((part for part in str(failure).split(". ") if part.startswith("Tried")), str(failure))
        self.captured = None
        config = self.config
        example = {
            k: v.repeat(config.accumulate, *[1] * (v.ndim - 1)).to(self.device) for k, v in self.validation[0].items()
        }
        traced = trace_step(
            self.model,
            self.loss_fn,
            example,
            self.optimizer,
            max_grad_norm=config.max_grad_norm,
            accumulate=config.accumulate,
        )
        total = torch.cuda.get_device_properties(self.device).total_memory
        peaks = passes.peak_bytes_by_policy(traced.step)
        known = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in peaks.items())
        fits = next((name for name, size in peaks.items() if size < 0.92 * total), None)
        advice = f"try --memory {fits}" if fits else f"no policy fits: lower --batch-size {config.batch_size}"
        return f"out of memory: {asked}; the step's estimated peak by --memory: {known}; {advice}"

    def _close(self, status: str, error: str | None) -> None:
        """Write the summary and the plot, whatever happened, and print where they are."""
        median = statistics.median(self.times_ms) if self.times_ms else None
        tokens_per_s = self.config.tokens_per_step / (median / 1e3) if median else None
        summary = Summary(
            status=status,
            error=error,
            preset=self.config.preset,
            params=self.params,
            steps=self.step,
            tokens=self.step * self.config.tokens_per_step,
            train_loss_nats=self.last_loss,
            val_loss_nats=self.val_loss,
            unigram_entropy_nats=self.unigram,
            tokens_per_s=tokens_per_s,
            step_ms_median=median,
            mfu=mfu(tokens_per_s, self.flops_per_token, self.peak) if tokens_per_s else None,
            capture_s=getattr(self, "capture_s", None),
            compile_s=self._compile_s(),
            peak_mem_gib=peak_mem_gib(self.device),
            wall_s=time.perf_counter() - self.started,
            versions=environment()["versions"],
        )
        self.folder.write_summary(summary)
        if self.last_loss is not None:
            self.folder.draw_loss(self.unigram)
        self.folder.close()
        if status == "finished":
            if self.config.export_hf is not None:
                save_hf(self.model, self.config.export_hf)
                print(f"weights for Hugging Face in {self.config.export_hf}")
            below = "below" if self.val_loss < self.unigram else "not below"
            print(
                f"done: {self.step} steps in {format_seconds(summary.wall_s)}; validation loss {self.val_loss:.4f} "
                f"nats, {below} the unigram entropy {self.unigram:.4f}"
            )
        print(f"records in {self.folder.path} (summary.json, loss.png, metrics.jsonl, tb/)")

    def _compile_s(self) -> float | None:
        captured = getattr(self, "captured", None)
        return sum(report.compile_s for report in captured.report) if captured else None

    def _write_passes(self) -> None:
        reports = self.captured.report
        self.folder.write_passes(passes.format_report(reports) + "\n", [dataclasses.asdict(r) for r in reports])

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name()
        return f"CPU with {torch.get_num_threads()} threads"


def _config_line(config: TrainConfig) -> str:
    """Every option and its value, in one line."""
    values = dataclasses.asdict(config) | {"model": dataclasses.asdict(config.model)}
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
