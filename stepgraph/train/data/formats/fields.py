"""The content of data fields: the text of a document, or the messages of a conversation."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from stepgraph.models.loss import PAIR
from stepgraph.train.data.sources import PAIRS

#: The fields of a conversation, the forms by which is looked first first: messages, ShareGPT's, Alpaca's, and pairs.
CHATS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))
_CHOICES = tuple(PAIR.split(","))
_ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")  # ShareGPT's
_SYSTEM = ("system", "system_prompt")  # next to a conversation: how it begins
TOOLS = ("tools", "functions")  # what the assistant may call, which templates would have to be given
NO_TOOLS = ("[]", "{}", "null")  # as text in a column


def field_of(names: Iterable[str], text_field: str, where: str) -> tuple[str, bool, str]:
    """Of columns: the first one with the documents, whether these are conversations, and what they are called. With
    ``text_field=PAIR`` a document is two conversations, of which the first is the better one.

    Raises ``ValueError`` where there is neither ``text_field`` nor a conversation, or two of one.
    """
    names = list(names)
    if text_field == PAIR:
        if missing := next((name for name in _CHOICES if name not in names), None):
            has = ", ".join(names[:8]) or "none"
            raise ValueError(f"{where}: no field {missing!r} (it has {has}): pairs are prompt, chosen and rejected")
        return _CHOICES[0], True, PAIRS
    forms = [form for form in CHATS if text_field not in names and set(form) <= set(names)]
    chat, field = bool(forms), forms[0][0] if forms else text_field
    if field not in names:
        raise no_field(where, text_field, names)
    if (count := names.count(field)) > 1:
        raise ValueError(f"{where}: {count} columns are called {field!r}: keep one of them")
    return field, chat, "conversations" if chat else "documents"


def columns_of(names: Iterable[str], field: str, chat: bool) -> list[str]:
    """The columns that `document_of` looks at."""
    form = next((form for form in (*CHATS, _CHOICES) if chat and form[0] == field), (field,))
    more = ("prompt",) if form == _CHOICES else ("input", "history")
    return [*form, *(name for name in (*TOOLS, *_SYSTEM, *more) if chat and name in names)]


def document_of(row: Mapping[str, Any], where: str, field: str, chat: bool) -> bytes:
    """The text in ``field`` of a row, or the conversation. ``ValueError`` for anything else, and with tools."""
    if chat and any((row.get(name) or NO_TOOLS[0]) not in NO_TOOLS for name in TOOLS):
        raise no_tools(where)
    if chat and field == _CHOICES[0]:
        return b"[%b,%b]" % tuple(conversation(*side) for side in _pair(row, where))
    if not chat:
        return encoded(row[field], where, field)
    return conversation(_begun(row, _messages(row, field), where), where, field)


def _begun(row: Mapping[str, Any], messages: Any, where: str) -> Any:
    """``messages`` after what the row says of the system, if they do not say so themselves."""
    told = next(((name, row[name]) for name in _SYSTEM if row.get(name)), None)
    if told is None or not isinstance(messages, list):
        return messages
    own = next((m for m in messages[:1] if isinstance(m, dict) and m.get("role") == "system"), None)
    if not isinstance(told[1], str) or (own is not None and own.get("content") != told[1]):
        raise ValueError(
            f"{where}: {told[0]!r} is not a string, or differs from the conversation's own system message: leave it out"
        )
    return messages if own else [{"role": "system", "content": told[1]}, *messages]


def _messages(row: Mapping[str, Any], field: str) -> Any:
    """A row as a list of messages, if it has the form that ``field`` starts."""
    match field, row[field]:
        case "conversations", [*turns]:
            keys = {"from": "role", "value": "content"}
            said = ({keys.get(k, k): v for k, v in t.items()} if isinstance(t, dict) else {"turn": t} for t in turns)
            return [t | {"role": _ROLES.get(t.get("role"), t.get("role"))} for t in said]
        case (("instruction" | "prompt"), asked):
            answer = row.get("output" if field == "instruction" else "completion")
            sides = [("user", asked), ("assistant", answer)]
            if field == "instruction":
                texts = [text for text in (asked, row.get("input")) if text]
                if all(isinstance(text, str) for text in texts):
                    sides[0] = "user", "\n\n".join(texts) or asked
                else:  # `conversation` says what is wrong
                    sides[0] = "user", next(text for text in texts if not isinstance(text, str))
                sides = [*_earlier(row.get("history") or []), *sides]
            said = (side if isinstance(side, list) else [{"role": who, "content": side}] for who, side in sides)
            return [message for messages in said for message in messages]
    return row[field]


def _earlier(history: Any) -> Iterator[tuple[str, Any]]:
    """Who said what in Alpaca's ``history``, pairs of a question and its answer; else what `conversation` refuses."""
    for turn in history if isinstance(history, list) else [history]:
        if isinstance(turn, list) and len(turn) == 2:
            yield from zip(("user", "assistant"), turn, strict=True)
        else:
            yield "user", {"history": turn}


def _pair(row: Mapping[str, Any], where: str) -> Iterator[tuple[Any, str, str]]:
    """The arguments of `conversation` for the chosen and the rejected one. What both begin with has weight 0: it is
    the prompt, of which a conversation may have a copy."""
    prompt = row.get("prompt")
    if prompt is None and any(isinstance(row.get(name), str) for name in _CHOICES):
        raise ValueError(f"{where}: answers without a prompt: add the field 'prompt', or lists of messages")
    prompt, *sides = (
        [{"role": who, "content": said}] if isinstance(said, str) else said
        for who, said in (("user", prompt or []), *(("assistant", row.get(name)) for name in _CHOICES))
    )
    if all(isinstance(side, list) for side in (prompt, *sides)):
        said = [[(m.get("role"), m.get("content")) if isinstance(m, dict) else m for m in s] for s in (prompt, *sides)]
        if not all(side[: len(prompt)] == said[0] for side in said[1:]):
            sides, said[1:] = [prompt + side for side in sides], [said[0] + side for side in said[1:]]
        last = min(map(len, sides)) - 1
        shared = next((i for i, (a, b) in enumerate(zip(*said[1:], strict=False)) if a != b or i == last), 0)
        sides = [[m | {"weight": 0} if isinstance(m, dict) else m for m in s[:shared]] + s[shared:] for s in sides]
        sides = [_begun(row, side, where) for side in sides]
    return ((side, where, name) for side, name in zip(sides, _CHOICES, strict=True))


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
    """The messages of a conversation as JSON. ``ValueError`` for anything but a list of roles with their content.

    Keys without a value are left out: a column of messages has all messages' keys in each.
    """
    fix = 'use a list of messages such as {"role": "user", "content": "Hello"}'
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {field!r} is {'empty' if value == [] else type(value).__name__}: {fix}")
    messages = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in value]
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"{where}: message {i} of {field!r} is {type(message).__name__}: {fix}")
        if message.get("tool_calls") or message.get("function_call"):
            raise no_tools(where)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                given = f"is {type(message[key]).__name__}, not a string" if key in message else "is missing"
                raise ValueError(f"{where}: {key!r} of message {i} of {field!r} {given}: {fix}")
    return encoded(json.dumps(messages, ensure_ascii=False), where, field)


def no_tools(where: str) -> ValueError:
    return ValueError(f"{where}: conversations with tools are not trained on: leave them out, and the field 'tools'")


def no_field(where: str, field: str, names: Iterable[str]) -> ValueError:
    has = ", ".join(list(names)[:8]) or "none"
    if {"chosen", "rejected"} <= set(names):
        return ValueError(f"{where}: preference pairs (chosen, rejected) are for --loss dpo: add it")
    return ValueError(f"{where}: no field {field!r} (it has {has}): name the one with the text by --text-field")
