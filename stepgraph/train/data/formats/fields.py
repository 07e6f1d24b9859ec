"""What the fields of data hold: the text of a document, or the messages of a conversation."""

import importlib
import json
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

MESSAGES = "messages"  # the field of a conversation
TOOLS = "tools"  # next to it: what the assistant may call, which templates would have to be given
NO_TOOLS = ("[]", "{}", "null")  # as a column of text has it


def field_of(names: Iterable[str], text_field: str, where: str) -> tuple[str, bool, str]:
    """Of columns: the one with the documents, whether these are conversations, and what they are called.

    Raises ``ValueError`` where there is neither ``text_field`` nor ``messages``, or two of one.
    """
    names = list(names)
    chat = text_field not in names and MESSAGES in names
    field = MESSAGES if chat else text_field
    if field not in names:
        raise no_field(where, text_field, names)
    if (count := names.count(field)) > 1:
        raise ValueError(f"{where}: {count} columns are called {field!r}: keep one of them")
    return field, chat, "conversations" if chat else "documents"


def columns_of(names: Iterable[str], field: str, chat: bool) -> list[str]:
    """The columns that `document_of` looks at."""
    return [field, TOOLS] if chat and TOOLS in names else [field]


def document_of(row: Mapping[str, Any], where: str, field: str, chat: bool) -> bytes:
    """The text in ``field`` of a row, or the conversation. ``ValueError`` for another kind of value, and for a
    conversation with tools."""
    if chat and (row.get(TOOLS) or NO_TOOLS[0]) not in NO_TOOLS:
        raise no_tools(where)
    return (conversation if chat else encoded)(row[field], where, field)


def optional(package: str, purpose: str) -> ModuleType:
    """An optional package, or a ValueError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ValueError(f"{purpose} needs the package {package}: pip install 'stepgraph[data]'") from error


def encoded(value: object, where: str, field: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field!r} is {type(value).__name__}, not a string: put each document's text there")
    try:
        return value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise ValueError(f"{where}: {field!r} is not valid Unicode ({error.reason}): fix the text") from error


def conversation(value: object, where: str, field: str) -> bytes:
    """The messages of a conversation as JSON. ``ValueError`` for anything but a list of roles with what they say.

    Keys without a value are left out: a column of messages has those of all its messages in each.
    """
    fix = 'give a list of messages such as {"role": "user", "content": "Hello"}'
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {field!r} is {'empty' if value == [] else type(value).__name__}: {fix}")
    messages = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in value]
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"{where}: message {i} of {field!r} is {type(message).__name__}: {fix}")
        if message.get("tool_calls"):
            raise no_tools(where)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                given = f"is {type(message[key]).__name__}, not a string" if key in message else "is missing"
                raise ValueError(f"{where}: {key!r} of message {i} of {field!r} {given}: {fix}")
    return encoded(json.dumps(messages, ensure_ascii=False), where, field)


def no_tools(where: str) -> ValueError:
    return ValueError(f"{where}: conversations with tools are not trained on: leave them out, and the field {TOOLS!r}")


def no_field(where: str, field: str, names: Iterable[str]) -> ValueError:
    has = ", ".join(list(names)[:8]) or "none"
    return ValueError(f"{where}: no field {field!r} (it has {has}): name the one with the text by --text-field")
