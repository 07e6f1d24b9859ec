"""Data sets of the ``datasets`` library, read whole."""

import hashlib
import os
from types import ModuleType

import numpy as np

from stepgraph.train.data.formats.fields import columns_of, document_of, field_of, optional
from stepgraph.train.data.sources import Source


class HuggingFace(Source):
    """A data set of the ``datasets`` library: its "train" split and, when it has one, its "validation" split.

    ``spec`` is ``NAME`` or ``NAME:CONFIG``; NAME is a data set on the Hub or a local folder (of data files, or written
    by ``save_to_disk``). Tables are memory-mapped by the library.
    """

    def __init__(self, spec: str, text_field: str):
        self.name = f"hf:{spec}"
        datasets = optional("datasets", f"reading {self.name}")
        name, config = parts_of(spec)
        try:
            loaded = datasets.load_from_disk(name) if saved_to_disk(name) else datasets.load_dataset(name, config)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise cannot_load(self.name, error, datasets) from error
        if isinstance(loaded, datasets.Dataset):
            loaded = {"train": loaded}
        require_train(self.name, loaded)
        parts = [loaded[split] for split in ("train", "validation") if split in loaded and len(loaded[split])]
        if not len(loaded["train"]):
            raise ValueError(f"{self.name} has no rows in its train split: give a dataset with text")
        for part in parts:
            self.field, self.chat, self.unit = field_of(part.column_names, text_field, self.name)
        self._parts = [part.select_columns(columns_of(part.column_names, self.field, self.chat)) for part in parts]
        self.size = sum(part.data.nbytes for part in self._parts)
        self._train_rows = len(parts[0])
        if len(parts) == 2:
            self.train = np.arange(self._train_rows)
            self.val = np.arange(self._train_rows, self._train_rows + len(parts[1]))
        else:
            self.split_by_index(self._train_rows)

    def stamp(self) -> str:
        """The times of the files that the library maps: it writes others where the data is another."""
        files = [file["filename"] for part in self._parts for file in part.cache_files]
        facts = [f"{file} {os.stat(file).st_mtime_ns}" for file in files]
        return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()

    def read(self, index: int) -> bytes:
        part, row = (0, index) if index < self._train_rows else (1, index - self._train_rows)
        where = f"{self.name}, {('train', 'validation')[part]} row {row}"
        return document_of(self._parts[part][int(row)], where, self.field, self.chat)


def parts_of(spec: str) -> tuple[str, str | None]:
    """The name and the configuration of ``NAME[:CONFIG]``."""
    name, _, config = (spec, "", "") if os.path.isdir(spec) else spec.partition(":")
    return name, config or None


def saved_to_disk(name: str) -> bool:
    """Whether this is a folder that ``save_to_disk`` wrote."""
    return any(os.path.isfile(os.path.join(name, marker)) for marker in ("dataset_dict.json", "state.json"))


def require_train(name: str, splits: object) -> None:
    """Raise ``ValueError`` where ``splits``, a mapping, has none called train."""
    if "train" not in splits:
        raise ValueError(f"{name} has the splits {', '.join(splits)}: a split named train is needed")


def cannot_load(name: str, error: Exception, datasets: ModuleType) -> ValueError:
    """The line for what the library raised."""
    generating = isinstance(error, datasets.exceptions.DatasetGenerationError)
    told = error.__cause__ if generating and error.__cause__ else error
    reason = (str(told).splitlines() or [type(told).__name__])[0]
    form = name.partition(":")[0]
    return ValueError(f"cannot load {name} ({reason}): give {form}:NAME or {form}:NAME:CONFIG")
