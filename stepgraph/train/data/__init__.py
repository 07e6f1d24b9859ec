"""Data: the sources and tokenizers that ``--data`` and ``--tokenizer`` name, and the batches of a training step."""

from dataclasses import dataclass

from stepgraph.train.data.chat import ChatTokenizer, PairTokenizer
from stepgraph.train.data.loader import Batch, MixedLoader, PackedLoader, validation_batches
from stepgraph.train.data.several import Part, open_parts, open_source, open_validation, require_one_kind
from stepgraph.train.data.sources import Corpus, Source
from stepgraph.train.data.token_cache import default_folder
from stepgraph.train.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer

Loader = PackedLoader | MixedLoader


@dataclass(frozen=True)
class DataBundle:
    """Opened sources, of which a mixture has several, their tokenizer, and a line on how much text there is."""

    parts: tuple[Part, ...]
    tokenizer: Tokenizer
    description: str

    @property
    def source(self) -> Corpus:
        """The first source; all hold the same kind of documents."""
        return self.parts[0].source


def open_data(
    data: str = "stdlib", tokenizer: str = "bytes", text_field: str = "text", row: int | None = None
) -> DataBundle:
    """Opens what ``--data``, ``--tokenizer`` and ``--text-field`` name. ``row``: tokens that conversations are cut to.
    Raises ``ValueError``: one line; an unknown form, or a missing, empty or corrupt file."""
    opened = open_tokenizer(tokenizer)  # first: a wrong name should not wait for a large file
    parts = open_parts(data, text_field)
    source = parts[0].source
    if source.chat:
        if tokenizer == "bytes":
            raise ValueError(
                f"{data} holds conversations, and bytes have no chat template: use --tokenizer FOLDER/tokenizer.json"
            )
        opened = ChatTokenizer(tokenizer, row) if not source.pairs else PairTokenizer(tokenizer, row and row // 2)
    require_one_kind([part.source for part in parts])
    shares = [f"{part.share:.1%} " if len(parts) > 1 else "" for part in parts]
    told = "; ".join(share + part.source.describe() for share, part in zip(shares, parts, strict=True))
    return DataBundle(tuple(parts), opened, told)
