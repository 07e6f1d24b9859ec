"""A training run, top to bottom: data, model, capture, steps, records."""

import contextlib
import dataclasses
import statistics
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import stepgraph
from stepgraph import parallel, passes
from stepgraph.capture.python.metrics import reported
from stepgraph.config import build
from stepgraph.config.device import (
    device_name,
    device_of,
    device_peak,
    is_out_of_memory,
    keep_freed_memory,
    peak_mem_gib,
)
from stepgraph.config.environment import environment
from stepgraph.config.train import PLAIN_STEP, TrainConfig, parse_steps
from stepgraph.costs.hardware import mfu
from stepgraph.errors import INTERRUPTED
from stepgraph.lower import StepSpec
from stepgraph.models import family_of, flops_per_token
from stepgraph.parallel.experts import capacity_of
from stepgraph.parallel.ranks import Ranks
from stepgraph.passes.waiting import Waiting
from stepgraph.run.spans import Spans
from stepgraph.run.watch.lost_ranks import is_lost_rank, lost_rank, report, wait_for_the_agent, who
from stepgraph.run.watch.signals import StopSignals
from stepgraph.run.watch.watch import Watch
from stepgraph.train import start
from stepgraph.train.faults import (
    OUTPUT,
    Finite,
    NotFiniteError,
    RecoverableErrors,
    StoppedError,
    asked_for,
    memory_advice,
)
from stepgraph.train.records.folder import RunFolder, SilentFolder, Summary, Wandb, package
from stepgraph.train.records.progress import Progress, format_seconds
from stepgraph.train.sample import Samples
from stepgraph.train.saving import CLAIM, Saving, export_saved
from stepgraph.train.start import lr_at
from stepgraph.train.traces.page import Bubble, RunPage
from stepgraph.train.traces.profile import FILE as TRACE
from stepgraph.train.traces.profile import MemorySnapshot, StepProfile
from stepgraph.train.validation import NotExactError, Validation, verify_step


class Figures:
    """Numbers of a step, on their way to the host: a copy that begins when they are there. To read the tensors of a GPU
    themselves would wait for the next step too, which is launched by then."""

    def __init__(self, *figures: torch.Tensor):
        self._host = [figure.detach().to("cpu", non_blocking=True) for figure in figures]
        self._there = torch.cuda.Event(enable_timing=True) if any(figure.is_cuda for figure in figures) else None
        if self._there:
            self._there.record()

    def read(self) -> list[Any]:
        """The numbers, as lists where they are vectors; waits until they are there."""
        if self._there:
            self._there.synchronize()
        return [figure.tolist() for figure in self._host]

    def ms_since(self, before: "Figures | None") -> float | None:
        """Milliseconds on the GPU from the numbers ``before`` to these, both there; None without a GPU or ``before``.

        The host reads the numbers of one step while it launches the next, so that time between reads is no step's."""
        if self._there is None or before is None or before._there is None:
            return None
        return before._there.elapsed_time(self._there)


@dataclass
class Launched:
    """A step that was launched; its loss and metrics may still be on their way."""

    step: int
    tokens: int  # seen so far
    figures: Figures  # the loss, the gradient norm and, of layers with experts, their loads
    metrics: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    lr: float
    data_ms: float  # that the loop waited for the batch
    spans: Spans | None  # what this rank of a pipeline computes, and when


#: Steps not timed: the first runs plainly, the second records CUDA graphs.
WARMUP_STEPS = 2
#: Seconds that ranks have at least to begin.
MEETING_S = 60.0
#: What a person opens first.
_RECORDS = ("page.html", "passes.txt", "summary.json", "metrics.jsonl", "tb/")


def run(config: TrainConfig) -> int:
    """Train as ``config`` says; the exit status: 0 when finished or stopped by a signal, 1 when training failed.

    Errors of use raise ``ValueError`` with one line; before the run begins they leave no run folder behind.
    """
    config.validate()
    device = device_of(config)
    # Processes that compile import torch for longer than a step is traced now; here ranks meet and a model is built.
    passes.prepare(config, (), passes.Target(device.type))
    # Ranks may begin some time apart: what they import is large.
    with parallel.started(config.mesh_spec, device.type, max(MEETING_S, config.comm_timeout)) as mesh:
        several = mesh is not None and mesh.spec.size > 1
        try:
            run = Run(config, device, mesh)
        except KeyboardInterrupt:
            return _interrupted("error: interrupted before the run began", several)
        except RuntimeError as failure:
            if not is_lost_rank(failure):
                raise
            print(f"error: {who()}{lost_rank(failure, 'the start')}", file=sys.stderr, flush=True)
            parallel.leave(1)
        try:
            status = run.train()
        except ValueError:
            raise  # an error of use, the same on every rank: reported in one line
        except KeyboardInterrupt:
            if not several:
                raise
            return _interrupted("interrupted", several)
        except Exception:
            if not several:
                raise
            traceback.print_exc()  # as Python would at its end, which this rank does not wait for
            status = 1
        if status and several:
            parallel.leave(status)
        del run  # whatever still holds the step: NCCL's groups close when its CUDA graphs have ended
        return status


def _interrupted(text: str, several: bool) -> int:
    """Answer Ctrl-C where there is nothing to save; one of ``several`` ranks does not wait for the others."""
    if parallel.says_first(text):
        print(text, file=sys.stderr)
    if several:
        parallel.leave(0 if parallel.starts_again() else INTERRUPTED)
    return INTERRUPTED


class Run:
    """One training run: everything it holds, and the loop. Every rank of a mesh has one; rank 0 prints and writes."""

    def __init__(self, config: TrainConfig, device: torch.device, mesh: parallel.Mesh | None):
        self.config = config
        self.started = time.perf_counter()
        self.device, self.mesh, self.ranks = device, mesh, Ranks()
        self.speaks = self.ranks.rank == 0
        self.failures = RecoverableErrors()
        self.say = self.failures.say if self.speaks else lambda *_: None
        self.say(f"stepgraph {stepgraph.__version__}, torch {torch.__version__}, {device_name(self.device)}")
        self.runs_ahead = self.device.type == "cuda"
        self.ranks.first(lambda: config.log == "wandb" and bool(package()))
        # Before the data is opened, which may take long.
        path, self.restarted, source = self.ranks.first(lambda: start.choose_folder(config))
        self.ranks.first(lambda: start.require_export(config, path))
        self.snapshot = MemorySnapshot(path) if config.memory_snapshot and self.speaks else None
        build.seed_all(config.seed)
        if self.device.type == "cpu":
            keep_freed_memory()

        data = start.open_fitting_data(config)
        self.config = config = start.with_document_mask(config, data.source.chat)
        self.config.validate()
        self.chat = data.source.chat
        self.loader, batches = start.open_batches(config, data, mesh)
        for cache in self.loader.caches:
            cache.start(self.say)  # from here on, only its thread reads the source
        with Waiting(self.say, "tokenizing all documents, to count the rows of an epoch"):
            self.config, epochs = start.with_steps_of_epochs(config, self.loader)
        config = self.config

        self.model = build.build_model(config, device, mesh)
        self.optimizer = build.build_optimizer(config, self.model)
        self.loss_fn = build.build_loss(config, device, mesh)
        self.validation = Validation(self.model, self.loss_fn, batches, device)
        self.samples = Samples(config, data.source.chat, self.model, self.ranks)
        self.done = {"step": 0, "tokens": 0}

        self.saving = Saving(config, path, mesh, self.ranks, device)
        if source:
            self._load(source)
        self.finite = Finite(config, path, self.ranks)
        self.folder: RunFolder | SilentFolder = SilentFolder(path)
        self.last_loss: float | None = None
        self.ranks.first(self._open_folder)

        self.params = config.model.num_params()
        self.flops_per_token = flops_per_token(config.model, config.seq_len)
        forward = 2 * config.model.num_params(lookup_table=False)
        if config.lora is not None:  # no products for the gradients of frozen weights
            self.flops_per_token -= forward
        if config.loss == "dpo":  # the reference's forward
            self.flops_per_token += forward
        self.peak = (device_peak(config, device) or 0) * self.ranks.world or None  # of all devices together
        self.captured: stepgraph.CapturedStep | None = None
        self.capture_s: float | None = None
        self.finished = 0  # steps that this process has done
        self.repeated_steps = 0  # how often it repeated one, with larger buffers for experts
        self.times_ms: list[float] = []
        self.val_loss: float | None = None
        self.waited_s = 0.0  # that the loop waited for the data of its next step
        self.bubble = Bubble()
        self.ending, self.ended = threading.Lock(), False  # for `close`
        self.signals = StopSignals(patient=self.ranks.world > 1, speaks=self.speaks)
        self.watch = Watch(
            *(self.ranks.rank, self.ranks.world, device.type),
            *(config.comm_timeout, config.first_step_timeout, partial(self.close, "failed")),
        )

        again = f", restarted after step {self.step}" if self.restarted else f", resumed after step {self.step}"
        self.say(f"run folder {path}" + (again if self.restarted or source else ""))
        self.say(start.options_lines(config, resumed=config.resume is not None))
        self.say(f"data {data.description}")
        self.say(f"data {'; '.join(cache.describe() for cache in self.loader.caches)}")
        if epochs:
            self.say(epochs)
        self.say(start.model_line(config, self.params))
        if config.lora is not None:
            trained = parallel.local_parts(self.model)  # whose shapes are without padding
            trained = sum(trained[n].shape.numel() for n, p in self.model.named_parameters() if p.requires_grad)
            self.say(f"lora {config.lora}: {trained:,} trained{start.quantized_words(config, self.model)}")
        self.say(start.mesh_line(config))
        self.page = RunPage(path, config, device, self.say) if self.speaks else None
        self.profile = self._profile() if config.profile else None
        self.warmup = WARMUP_STEPS + (self.profile is not None)  # one more, node by node, names kernels
        with self.failures.noted():
            self.folder.write_config(config)
            self.folder.write("environment.json", environment())

    def _open_folder(self) -> None:
        path = self.folder.path
        try:
            checkpointer, step = self.saving.checkpointer, self.step if self.restarted else self.saving.saved_step
            rewinds = step is not None and bool(checkpointer.after(step))
            self.folder = RunFolder(path, self.config, resume_step=step, rewinds=rewinds)
            start.keep_folder(path)
            checkpointer.rewind(self.step, self.folder.settle)
            self.last_loss = self.folder.last_loss
            self.folder.tracker = Wandb(self.config, path) if self.config.log == "wandb" else None
        except OSError as failure:
            raise ValueError(f"cannot write the run folder {path}: {failure.strerror}; choose another") from failure

    def _profile(self) -> StepProfile | None:
        """What `--profile` asks for; None where a resumed run is beyond it."""
        steps, least = parse_steps(self.config.profile), self.step + PLAIN_STEP + 1
        if steps[0] >= least:
            return StepProfile(steps, self.device, self.folder.path, self.speaks, self.failures.noted)
        if not (self.folder.path / TRACE).exists():
            self.say(f"warning: --profile {self.config.profile} is left out: after step {self.step}, {least} is the "
                     "first that can be profiled")  # fmt: skip
        return None

    def _load(self, path: Path) -> None:
        """Continue from the checkpoint ``path``, or that run's newest."""
        self.saving.load(path, self.state)
        if not self.restarted:
            self.ranks.first(lambda: start.require_work(self.config, self.step))
        self.saving.saved_step = self.step

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return self.done["step"]

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "trainer": self.done}

    def train(self) -> int:
        """Capture the step, run the steps, keep the records. The exit status."""
        with self.signals, self.watch, self.failures.of_threads():
            return self._train()

    def _train(self) -> int:
        status, error, lost = "failed", None, False
        try:
            if self.step < self.config.steps:  # else killed after its last checkpoint, or resumed for an export
                with self.signals.ctrl_c_at_once(), Waiting(self.say):
                    self._capture()
                if self.config.verify:
                    self.watch.at("the comparison with eager", limited=False)
                    with Waiting(self.say, "comparing the step with eager"):
                        verify_step(self.captured, self.validation.batches, self.config, self.device, self.say)
                self._steps()
            with Waiting(self.say, f"saving step {self.step}"):
                self._save(last=True)  # before all that may fail
            if self.failures.first:
                raise StoppedError(f"{self.failures.first}; step {self.step} is saved: --resume {self.folder.path}")
            finished = self.step == self.config.steps
            if finished:
                self.ranks.first(lambda: self.saving.checkpointer.finish(evict=not self.finite.in_a_row))
                with Waiting(self.say, "the last validation"):
                    self._validate()
            if finished and self.config.export_hf is not None:
                self.watch.at("the export", limited=False)
                with Waiting(self.say, "exporting for Hugging Face"):
                    export_saved(self.model, self.config, self.folder.path, self.step)
                self.say(f"weights and tokenizer for Hugging Face in {self.config.export_hf}")
            status = "finished" if finished else "interrupted"
        except (NotFiniteError, NotExactError, StoppedError, OSError) as failure:
            error = str(failure)
        except BaseException as failure:
            lost = is_lost_rank(failure)
            if lost:
                error = lost_rank(failure, self.watch.where)
            elif not is_out_of_memory(failure):
                error = traceback.format_exception_only(failure)[0].splitlines()[0]
                failure.add_note(f"{who()}{self.watch.where}")
                raise
            else:
                self.captured = None  # and with it what the graph holds
                error = memory_advice(failure, self.config, self._spec)
        finally:
            closes = [cache.close for cache in self.loader.caches]
            parts = [self.watch.ends, *closes, *([] if lost else [self.saving.finish])]
            for part in (*parts, partial(self.close, status, error)):
                with self.failures.noted(Exception):
                    part()
        if lost:  # and no cause of anything
            print(f"error: {who()}{error}", file=sys.stderr, flush=True)
            wait_for_the_agent(lambda: self.signals.received is not None)
            return 1
        if error := error or self.failures.first:
            report(error)
            return 1
        return 0

    def _spec(self) -> StepSpec:
        batch = build.example_batch(self.config, self.device, self.chat)
        return build.step_spec(self.config, self.model, self.loss_fn, batch, self.optimizer)

    def _capture(self) -> None:
        began = time.perf_counter()
        dump = self.folder.graphs if self.config.dump_graphs else None  # rank 0's alone
        self.captured = build.build_step(self.config, self._spec(), dump)
        program = self.captured.program
        self.watch.watches(self.captured)
        self.capture_s = time.perf_counter() - began
        if self.captured.saves:
            self.say("\n   ".join([self.captured.saved.line(), *self.captured.saved.notes]))
        if self.captured.pipeline is not None:
            self.say(str(self.captured.pipeline))
        self.say(start.graph_line(self.captured))
        if self.speaks:
            self.say(start.memory_line(program, self.device))
        self.say(start.pass_lines(self.config, self.captured.report, self.device))
        self.say(f"ready in {self.capture_s:.1f} s ({self.compile_s:.1f} s compiling)")
        with self.failures.noted():
            self.folder.write("graph.txt", program.text())
        self._write_passes()

    def _steps(self) -> None:
        """Run steps until all are done or a signal came, validating and saving in between.

        On a GPU, step n+1 is launched before step n's results are read, so that it never waits for the host.
        """
        config = self.config
        launched: Launched | None = None
        self._restart_clock()
        console = None if self.speaks else Console(quiet=True)
        with Progress(config.steps, console=console) as progress:
            if self.step and self._validates() and self.ranks.first(lambda: self.folder.validated != self.step):
                self._validate(progress=progress)  # this run was killed between the checkpoint and its validation
            while self.step < config.steps and not self._asked_to_stop():
                previous, launched = launched, self._launch()
                if previous:
                    self._finish(previous, progress)
                if self.finished == self.warmup:
                    self.saving.prepare(self.step, self.state)
                validate = self._validates()
                save = self.step < config.steps and config.checkpoint_every and self.step % config.checkpoint_every == 0
                show = self.finished == self.warmup and self.page is not None and self.page.account is None
                if validate or save or show or not self.runs_ahead:
                    self._finish(launched, progress)
                    launched = None
                if show:
                    self._show()
                if save:
                    self._save(last=False)
                if validate:
                    self._validate(progress=progress)
                if validate or save or show:
                    self._restart_clock()
            if launched:
                self._finish(launched, progress)
            if self.step < config.steps:
                why = self.signals.received or self.failures.first or "a signal to another rank, or its failure"
                self.say(f"{why}: stopping after step {self.step}; continue with --resume {self.folder.path}")
        if self.captured.pipeline is not None:
            self.watch.at("the share of bubbles", limited=False)
            if bubble := self.bubble.measure(self.ranks, self.captured):
                self.say(bubble)
        self._write_passes()  # what the first steps compiled and recorded is known now

    def _asked_to_stop(self) -> bool:
        """Whether a signal or a failure reached any rank: all stop after the same step, or one would wait for ever."""
        began = time.perf_counter()
        with self.failures.noted():
            for line in self.saving.written():
                self.say(line)
        with self.failures.noted(ValueError, what="the data cannot be read"):
            self.loader.ready()
        self.waited_s = time.perf_counter() - began
        received = self.signals.received is not None or self.failures.first is not None
        if self.ranks.world == 1:
            return received
        self.watch.at(f"the vote on stopping after step {self.step}")
        anywhere = torch.tensor(int(received))  # on the CPU, which does not wait for the GPU
        torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
        return bool(anywhere)

    def _launch(self) -> Launched:
        """Start the next step on the next batch."""
        began = time.perf_counter()
        batch = next(self.loader)
        data_ms = (self.waited_s + time.perf_counter() - began) * 1e3
        if self.device.type == "cuda":
            batch = {k: v.pin_memory().to(self.device, non_blocking=True) for k, v in batch.items()}
        lr = lr_at(self.step, self.config)
        for group in build.param_groups(self.optimizer):
            group["lr"] = lr
        self.watch.launches(self.step + 1)
        profile = self.profile and self.profile.around(self.step + 1, self.captured)
        with profile or contextlib.nullcontext():
            loss = self.captured(batch)
        self.done["step"] += 1
        self.done["tokens"] += self.config.tokens_per_step
        captured, tokens = self.captured, self.done["tokens"]
        figures = Figures(loss, captured.metrics["grad_norm"], *reported(captured.metrics).values())
        return Launched(self.step, tokens, figures, captured.metrics, batch, lr, data_ms, captured.spans)

    def _finish(self, launched: Launched, progress: Progress) -> None:
        """Wait for a launched step, check its loss, and record it."""
        step = launched.step
        self.watch.waits_for(step)
        loss, grad_norm, *rest = launched.figures.read()
        now = time.perf_counter()
        on_host, self.last_time = (now - self.last_time) * 1e3, now
        on_gpu, self.last_figures = launched.figures.ms_since(self.last_figures), launched.figures
        step_ms = on_host if on_gpu is None else on_gpu
        self.finished += 1
        if repeats := int(launched.metrics.get("repeated", 0)):
            self.repeated_steps += repeats
            room = capacity_of(self.model).multiple
            again = f"step {step} repeated with larger buffers for experts; --expert-capacity {room:g} has them"
            with self.failures.noted():
                progress.note(again)
        if not self.finite.accepts(step, loss, grad_norm, launched.batch):
            with self.failures.noted():
                progress.note(f"step {step} skipped: its loss is {loss}, its gradient norm {grad_norm}")
                self.folder.log(step, skipped_steps=self.finite.skipped)
            return
        self.last_loss = loss
        if self.finished <= self.warmup:
            self.watch.warmed(step_ms / 1e3)
        elif not (self.profile and self.profile.disturbs(step)):
            self.times_ms.append(step_ms)
            self.watch.timed(step_ms / 1e3)
            if launched.spans is not None:
                self.bubble.add(launched.spans)
        if step % self.config.log_every == 0 or step == self.config.steps:
            tokens_per_s = self.config.tokens_per_step / (step_ms / 1e3)
            record = {
                "loss": loss,
                "grad_norm": grad_norm,
                "step_ms": step_ms,
                "tokens_per_s": tokens_per_s,
                "mfu": mfu(tokens_per_s, self.flops_per_token, self.peak),
                "mem_gib": peak_mem_gib(self.device),
            }
            repeated = {"repeated_steps": self.repeated_steps} if "repeated" in launched.metrics else {}
            others = {"lr": launched.lr, "tokens": launched.tokens, "data_ms": launched.data_ms} | repeated
            found = dict(zip(reported(launched.metrics), rest, strict=True))
            with self.failures.noted():
                self.folder.log(step, **found, **record, **others)
            loads = {name: found[name] for name in ("expert_load",) if name in found}
            with self.failures.noted(what=OUTPUT):
                progress.update(step, lr=launched.lr, **record, **loads)
        if self.finished == 1:
            self.last_time = time.perf_counter()  # the first record loads TensorBoard

    def _restart_clock(self) -> None:
        """Time the next step from now on: what came before it was no step."""
        self.last_time: float = time.perf_counter()
        self.last_figures: Figures | None = None

    def _show(self) -> None:
        """Write what shows the step: the page, and the snapshot of its memory."""
        with self.failures.noted():
            self.page.write(self.captured.program)
            if self.snapshot:
                self.snapshot.write()

    def _validates(self) -> bool:
        """Whether a validation is due in mid-run."""
        every = self.config.val_every
        return self.step < self.config.steps and every > 0 and self.step % every == 0

    def _validate(self, progress: Progress | None = None) -> None:
        """Record the mean loss over the validation batches at the current step, and a sample where one is due.
        ``progress``: None at the end of the run. An error is raised after the state is saved, if this process is the
        whole run: other ranks would wait in the validation."""
        where = f"the validation after step {self.step}"
        self.watch.at(where, limited=False)
        what = f"the validation loss after step {self.step}"
        try:
            losses = self.validation.losses(lambda loss, batch: self.finite.require(what, loss, self.step, batch))
            sample = self.samples.after(self.step, last=progress is None)
        except Exception as failure:
            traceback.clear_frames(failure.__traceback__)  # they hold activations
            if self.ranks.world == 1:
                with self.failures.noted():
                    self.saving.save(self.step, self.state, last=True, evict=False)
            saved = self.saving.saved_step == self.step
            again = f"step {self.step} is saved: --resume {self.folder.path}" if saved else "the state is not saved"
            if is_out_of_memory(failure):
                raise StoppedError(
                    f"{where} ran out of memory (asked for {asked_for(failure)}), not a training step; {again} with a "
                    "lower --batch-size, which validation has too"
                ) from failure
            failure.add_note(again)
            raise
        self.val_loss = losses["val_loss"]
        with self.failures.noted(what=OUTPUT):
            note = progress.note if progress else self.say
            if progress:
                note(f"step {self.step} | val_loss {self.val_loss:.4f}")
            if sample is not None:
                note(f"step {self.step} | sample {self.config.sample_prompt + sample!r}")
        if self.folder.validated != self.step:  # else recorded before this process resumed the run
            with self.failures.noted():
                self.folder.log(self.step, **losses, **({} if sample is None else {"sample": sample}))

    def _save(self, *, last: bool) -> None:
        """Save the state. In mid-run an error lets the run stop as for a signal, which saves once more. While steps are
        left out, the weights may be the cause: the state is saved only where the run ends, in addition to others."""
        self.watch.at(f"the checkpoint of step {self.step}", limited=False)
        sound = not self.finite.in_a_row
        if not last and not sound:
            return self.say(f"no checkpoint of step {self.step}: steps are skipped, and its weights may be the cause")
        with contextlib.nullcontext() if last else self.failures.noted():
            waited_s = self.saving.save(self.step, self.state, last=last, evict=sound)
        if self.saving.saved_step == self.step and not last:
            with self.failures.noted():
                self.folder.log(self.step, save_s=waited_s)

    @property
    def compile_s(self) -> float | None:
        """Seconds in compilers and in recording CUDA graphs so far."""
        return sum(report.compile_s for report in self.captured.report) if self.captured else None

    def _write_passes(self) -> None:
        reports = [dataclasses.replace(report, excerpts=[]) for report in self.captured.report]  # the page has those
        with self.failures.noted():
            self.folder.write("passes.txt", passes.format_report(reports) + "\n")
            self.folder.write("passes.json", [dataclasses.asdict(report) for report in reports])

    def close(self, status: str, error: str | None) -> None:
        """Write the records that come last, and say where they are. What cannot be written is noted in ``failures``.
        The watch's thread and the main thread may both come here: the second waits for the first."""
        with self.ending:
            if not self.ended:
                self.ended = True
                self._close(status, error)

    def _close(self, status: str, error: str | None) -> None:
        summary, export, path = self.summarize(status, error), self.config.export_hf, self.folder.path

        def show() -> None:
            if self.snapshot:
                self.snapshot.write()
            if self.page is not None:
                program, profile = self.captured and self.captured.program, self.profile and self.profile.result
                self.page.finish(program, summary, profile, self.bubble.measured)

        def claimed() -> None:
            if status == "finished" and export is not None and self.speaks:
                (export / CLAIM).unlink(missing_ok=True)

        for write in (lambda: self.folder.write_summary(summary), claimed, show, self.folder.close):
            with self.failures.noted(Exception):
                write()
        if status == "finished":
            steps = f"{self.step} step{'s' * (self.step != 1)} in {format_seconds(summary.wall_s)}"
            self.say(f"done: {steps}; validation loss {self.val_loss:.4f}")
        names = [name for name in _RECORDS if (path / name).exists()]
        self.say(f"records in {path}: {', '.join(names)}" if names else f"no records in {path}")
        if self.saving.saved_step is not None and (path / "checkpoints").exists():
            self.say(f'sample  stepgraph sample {path} {"--chat " * self.chat}--prompt "..."')
            if family_of(self.config.model).hugging_face is not None:
                self.say(f"export  stepgraph export {path} --out FOLDER")
            epochs = self.config.epochs
            more = f" --steps {2 * self.step}" if epochs is None else f" --epochs {2 * epochs:g}"
            more = more if self.step == self.config.steps else ""
            more += " --export-hf NEW_FOLDER" if status == "finished" and export is not None else ""
            self.say(f"resume  stepgraph train --resume {path}{more}")

    def summarize(self, status: str, error: str | None) -> Summary:
        """The figures so far."""
        median = statistics.median(self.times_ms) if self.times_ms else None
        tokens_per_s = self.config.tokens_per_step / (median / 1e3) if median else None
        compile_s, versions = None, {}
        with self.failures.noted(Exception):
            compile_s = self.compile_s
        with self.failures.noted(Exception):
            versions = environment()["versions"]
        return Summary(
            status=status,
            error=error,
            preset=self.config.preset,
            params=self.params,
            steps=self.step,
            tokens=self.done["tokens"],
            skipped_steps=self.finite.skipped,
            repeated_steps=self.repeated_steps,
            train_loss_nats=self.last_loss,
            val_loss_nats=self.val_loss,
            tokens_per_s=tokens_per_s,
            step_ms_median=median,
            mfu=mfu(tokens_per_s, self.flops_per_token, self.peak) if tokens_per_s else None,
            bubble=self.bubble.share,
            capture_s=self.capture_s,
            compile_s=compile_s,
            peak_mem_gib=peak_mem_gib(self.device),
            wall_s=time.perf_counter() - self.started,
            versions=versions,
        )
