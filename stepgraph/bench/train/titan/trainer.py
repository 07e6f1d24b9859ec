"""torchtitan's ``Trainer`` as a `Training`."""

import contextlib
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.bench.train.titan.job import NAME, job_config
from stepgraph.bench.train.titan.models import PEERS
from stepgraph.bench.train.titan.weights import fill
from stepgraph.config.train import TrainConfig
from stepgraph.models import family_of

Batch = Callable[[int], dict[str, torch.Tensor]]  # data-parallel rank -> tokens and targets


def register(config: TrainConfig, batch: Batch) -> None:
    """Adds our model and data to torchtitan's registry, under ``NAME``."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.protocols.train_spec import register_train_spec

    class SameBatch(BaseDataLoader):
        """One batch again and again, in parts of as many rows as the trainer takes at once: ``({"input": (B, T)},
        labels (B, T))`` on the CPU."""

        def __init__(self, dp_rank: int, job_config: Any, **_: Any):
            drawn, rows = batch(dp_rank), job_config.training.local_batch_size
            self.parts = list(zip(drawn["tokens"].split(rows), drawn["targets"].split(rows), strict=True))

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                for tokens, targets in self.parts:
                    yield {"input": tokens}, targets

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class LastLoss(MetricsProcessor):
        """Reads results only in a step that asks for them, and prints nothing."""

        wanted, loss = False, None

        def should_log(self, step: int) -> bool:
            return self.wanted

        def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
            self.loss = float(global_avg_loss)

    def build_loss_fn(*args: Any, **options: Any) -> Callable:
        """The sum over tokens divided by those of the step, as outside pipelines: in one, release 0.2.2 divides what it
        reports and not what it differentiates."""
        summed = spec_loss(*args, **options)
        return lambda prediction, labels: summed(prediction, labels) / config.tokens_per_step

    peer = PEERS[family_of(config.model).name]
    spec = importlib.import_module(peer.module).get_train_spec()
    spec.model_args = {NAME: peer.arguments(config.model)}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = SameBatch
    spec.build_metrics_processor_fn = lambda job, dims, args: LastLoss(job, dims)
    spec_loss = spec.build_loss_fn
    if config.mesh_spec.pp > 1:
        spec.build_loss_fn = build_loss_fn
    register_train_spec(NAME, spec)


class Titan:
    """A `Training` by torchtitan's ``Trainer``."""

    capture_s: float | None = None
    compile_s: float | None = None
    passes: list[str] | None = None

    def __init__(self, config: TrainConfig, batch: Batch, folder: str, balanced: bool):
        self.tokens_per_step = config.tokens_per_step
        from torchtitan.tools.logging import init_logger
        from torchtitan.train import Trainer

        start = time.perf_counter()
        init_logger()
        register(config, batch)
        self.trainer = Trainer(job_config(config, folder, balanced))
        for part in self.trainer.model_parts:
            fill(part, config)
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)
        self.build_s = time.perf_counter() - start

    def step(self, read: bool = False) -> float | None:
        """As one turn of the loop in ``Trainer.train``."""
        trainer, metrics = self.trainer, self.trainer.metrics_processor
        metrics.wanted = read
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(self.batches)
        return self._loss() if read else None

    def _loss(self) -> float:
        """The loss of the whole mesh, which in a pipeline only ranks with the last stage have."""
        trainer, loss = self.trainer, self.trainer.metrics_processor.loss
        if not trainer.parallel_dims.pp_enabled:
            return loss
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss if trainer.pp_has_last_stage else None)
        return next(loss for loss in losses if loss is not None) * self.tokens_per_step  # see build_loss_fn


@contextlib.contextmanager
def started(config: TrainConfig, batch: Batch, balanced: bool = False) -> Iterator[Titan]:
    """torchtitan's trainer over the processes that were started; it opens and closes the process groups."""
    with tempfile.TemporaryDirectory(prefix="stepgraph-bench-", ignore_cleanup_errors=True) as folder:
        titan = Titan(config, batch, folder, balanced)
        try:
            yield titan
        finally:
            titan.trainer.close()
            torch.distributed.destroy_process_group()
