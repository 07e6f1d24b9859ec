"""``--log wandb``: the metrics of a run also in Weights & Biases, which is an optional package."""

import contextlib
import importlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from stepgraph.config.train import TrainConfig
from stepgraph.train.records.files import write_json


class Wandb:
    """The run of ``config`` in Weights & Biases; what is set up for it (``WANDB_MODE``, ``WANDB_PROJECT``, ...) holds.

    The run folder keeps its id in ``wandb.json``, so that a resumed run continues the same one.

    Raises ValueError, in one line, where the package is missing or does not start.
    """

    def __init__(self, config: TrainConfig, path: Path):
        wandb, file = package(), path / "wandb.json"
        if not file.exists():
            write_json(file, {"id": uuid.uuid4().hex[:12]})
        options = json.loads(config.to_json())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "stepgraph"),
                name=path.name,
                id=json.loads(file.read_text())["id"],
                resume="allow",
                dir=str(path),
                config=options,
            )
        except Exception as failure:  # its own kinds of error, and its service's
            raise ValueError(f"wandb does not start ({_told(failure)}): log in, or set WANDB_MODE=offline") from failure

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        """Record ``scalars`` by their TensorBoard tags. A step that was recorded before a resume is not again. OSError,
        in one line, where the package fails."""
        with _failing():
            self._run.log(scalars, step=step)

    def close(self) -> None:
        """Send what is left. OSError as of `log`."""
        with _failing():
            self._run.finish()


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Makes any error of the package, which has kinds of its own, an OSError in one line."""
    try:
        yield
    except Exception as failure:
        raise OSError(
            f"wandb failed ({_told(failure)}): continue without --log wandb, or with WANDB_MODE=offline"
        ) from failure


def _told(failure: Exception) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:200]


def package() -> ModuleType:
    """The package. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ValueError("--log wandb needs the package wandb: pip install 'stepgraph[wandb]'") from error
