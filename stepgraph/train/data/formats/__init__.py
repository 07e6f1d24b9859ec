"""The formats of ``--data``: text, JSON lines, parquet and data sets of Hugging Face, all read lazily."""

from pathlib import Path

from stepgraph.errors import require_file
from stepgraph.train.data.formats.files import JsonLines, Parquet, TextFile, unpacked
from stepgraph.train.data.formats.hub import HuggingFace, Streamed
from stepgraph.train.data.sources import Corpus, Sections, Source, Stdlib

FORMS = "stdlib, FILE.jsonl or FILE.txt (or with .gz), FILE.parquet, hf:NAME or hf-stream:NAME"
#: Prefixes of the name of a data set: read whole, or during training.
WHOLE, STREAMED = "hf:", "hf-stream:"


def open_source(data: str, text_field: str = "text") -> Corpus:
    """What one name of ``--data`` means: ``stdlib``, ``FILE.jsonl``, ``FILE.txt``, ``FILE.parquet``, ``hf:NAME``
    or ``hf-stream:NAME``.

    ``text_field`` is the field or column with the text, in jsonl and parquet files and in data sets. The first document
    is read here, so that a wrong field or kind of file raises at once.

    Raises:
        ValueError: one line, for a missing, empty or corrupt file, a missing package, and any other form.
    """
    if data == "stdlib":
        return Stdlib()
    if data.startswith(STREAMED) and data != STREAMED:
        return Streamed(data.removeprefix(STREAMED), text_field)
    if data.startswith(WHOLE) and data != WHOLE:
        source = HuggingFace(data.removeprefix(WHOLE), text_field)
    else:
        source = _open_file(data, text_field)
    first = source.read(0)
    # A conversation that is alone cannot be cut: it is for training, unless all are for validation.
    return source if source.chat or len(source) > 1 else Sections(source, first)


def _open_file(data: str, text_field: str) -> Source:
    path = Path(data)
    packed = path.suffix.lower() == ".gz"
    suffix = path.with_suffix("").suffix.lower() if packed else path.suffix.lower()
    if suffix not in (".jsonl", ".txt", ".parquet") or (packed and suffix == ".parquet"):
        raise ValueError(f"unknown data {data!r}: give {FORMS}")
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise ValueError(f"{path} is empty: give a file with text")
        require_file(path)
        with path.open("rb"):  # a missing file, a file that may not be read
            pass
    except OSError as error:
        raise ValueError(f"cannot read data {path}: {error.strerror}; give the path of a readable file") from error
    there = unpacked(path) if packed else path
    if suffix == ".txt":
        source = TextFile(there, str(path))
    elif suffix == ".jsonl":
        source = JsonLines(there, text_field, str(path))
    else:
        source = Parquet(path, text_field)
    if packed:
        source.stamp = lambda: str(path.stat().st_mtime_ns)  # not that of the copy
    return source
