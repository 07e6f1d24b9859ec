"""Data: the sources and tokenizers that ``--data`` and ``--tokenizer`` name, and the batches of a training step."""

from dataclasses import dataclass

from stepgraph.train.data.chat import ChatTokenizer
from stepgraph.train.data.formats import open_source
from stepgraph.train.data.loader import Batch, PackedLoader, unigram_entropy, validation_batches
from stepgraph.train.data.sources import Source
from stepgraph.train.data.token_cache import default_folder
from stepgraph.train.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer


@dataclass(frozen=True)
class DataBundle:
    """An opened source, its tokenizer, and a one-line description of how much text there is."""

    source: Source
    tokenizer: Tokenizer
    description: str


def open_data(data: str = "stdlib", tokenizer: str = "bytes") -> DataBundle:
    """Opens what ``--data`` and ``--tokenizer`` name.

    Raises:
        ValueError: one line; an unknown form, or a missing, empty or corrupt file.
    """
    opened = open_tokenizer(tokenizer)  # first: a wrong name should not wait for a large file
    source = open_source(data)
    if source.chat:
        if tokenizer == "bytes":
            raise ValueError(
                f"{data} holds conversations, and bytes have no chat template: give --tokenizer FOLDER/tokenizer.json"
            )
        opened = ChatTokenizer(tokenizer)
    return DataBundle(source, opened, source.describe())
