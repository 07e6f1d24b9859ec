"""Conversations as tokens: rendered by the tokenizer's own chat template, with the assistant's tokens marked.

A token that is not the assistant's is context, not a target. It is given as ``~id``, which is
negative, so that one stream holds both.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stepgraph.train.data.tokenizer import JsonTokenizer, TokenizerFiles

#: Around what a template marks as generated; Unicode has no characters here, and never will.
OPEN, CLOSE = "\ufdd0", "\ufdd1"

#: Characters per token that are tokenized of a long conversation: some ten times as many as a token has.
_CHARACTERS = 64

Message = dict[str, Any]
Span = tuple[int, int]


class ChatTemplate:
    """A Jinja template of transformers' ``apply_chat_template``; ``tokens``: ``bos_token`` and the like, as text.

    It runs in Jinja's sandbox. There is no clock (``strftime_now``) in it: tokens do not depend on the day.

    Raises ``ValueError``, in one line, for a text that is no template.
    """

    def __init__(self, text: str, tokens: dict[str, str]):
        self.text, self._tokens = text, tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot be read ({error}): copy it again from its model") from error
        self._marks = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None

    def render(self, messages: list[Message], *, prompt: bool = False) -> str:
        """The text of ``messages``; with ``prompt``, plus the prefix of the assistant's next one."""
        return self._render(messages, prompt).replace(OPEN, "").replace(CLOSE, "")

    def spans(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """The text of ``messages``, and the (start, end) of all that the assistant says, its ends of turns included.

        As ``{% generation %}`` marks it; in a template without these, what each of the assistant's messages adds to the
        text up to there. Raises ``ValueError`` where a template rewrites earlier messages.
        """
        if self._marks:
            text, spans = _without_marks(self._render(messages, False))
            learned = [_is_learned(message) for message in messages if message["role"] == "assistant"]
            if not all(learned) and len(learned) != len(spans):
                raise ValueError(
                    f"the chat template marks {len(spans)} generations of {len(learned)} assistant messages, so those "
                    "with weight 0 or without content cannot be identified: leave such conversations out"
                )
            return text, spans if all(learned) else [span for span, on in zip(spans, learned, strict=True) if on]
        text, spans = self.render(messages), []
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or not _is_learned(message):
                continue
            after = self.render(messages[: place + 1])
            before = self.render(messages[:place], prompt=True) if place else self._before_first(message, after)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    "the chat template rewrites earlier messages, so the assistant's words cannot be found: put "
                    "{% generation %} ... {% endgeneration %} around them in the template"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _before_first(self, message: Message, text: str) -> str:
        """The part of ``text``, the rendering of ``message`` alone, before the assistant's words."""
        try:
            return self.render([], prompt=True)
        except ValueError:  # many templates look at the first message, whatever it is
            introduction = self.render([message], prompt=True).removeprefix(text)
            before, found, _ = text.partition(introduction) if introduction else ("", "", "")
            if not found:
                raise
            return before + found

    def _render(self, messages: list[Message], prompt: bool) -> str:
        # Neither tools nor documents: templates ask whether these are None, as transformers gives them.
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt}
        try:
            return self._template.render(**given, **self._tokens)
        except Exception as error:  # a template is a program, and may divide by zero
            reason = error if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            said = " / ".join(str(message.get("content"))[:40] for message in messages[:2])
            raise ValueError(
                f"the chat template refuses a conversation ({reason}): {said!r}; leave it out, or fix the template"
            ) from error


class _Generation(Extension):
    """``{% generation %}``: puts marks around what is inside."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


def _is_learned(message: Message) -> bool:
    """Whether an assistant's message is a target: it has content, and no weight of 0 under any of its names."""
    weights = {name: message.get(name, 1) for name in ("weight", "train", "training")}
    for name, weight in weights.items():
        if type(weight) not in (bool, int, float) or weight not in (0, 1):
            raise ValueError(f"{name}={weight!r} of a message is not allowed: use 0 (not learned) or 1")
    return all(weights.values()) and bool(message["content"].strip())


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """``text`` without marks, and the spans that they enclosed."""
    whole, spans = "", []
    for part in re.split(f"({OPEN}[^{CLOSE}]*{CLOSE})", text):
        if part.startswith(OPEN):
            spans.append((len(whole), len(whole) + len(part) - 2))
        whole += part.strip(OPEN + CLOSE)
    return whole, spans


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter of transformers, in the order of its arguments."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTokenizer(JsonTokenizer):
    """A ``tokenizer.json`` with the chat template next to it; a document is the JSON of a list of messages.

    The template is ``chat_template.jinja`` or the entry of that name in ``tokenizer_config.json``. Special tokens that
    the template writes are encoded as such, the ones that a message spells too, as transformers does.

    ``row``: conversations are cut to this many tokens; a longer one gives only ``row + 1``. The last of
    these has the sign of the assistant's where any of the rest is the assistant's.

    Raises ``ValueError``, in one line, as `JsonTokenizer` does, and where there is no template.
    """

    def __init__(self, path: str | Path, row: int | None = None):
        super().__init__(path)
        self._row = row
        files = TokenizerFiles(str(path))
        text = files.chat_template
        if text is None:
            raise ValueError(
                f"{path} has no chat template next to it (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), which conversations need: use the tokenizer of an instruct model"
            )
        self.template = ChatTemplate(text, files.special_tokens)
        self._tokenizer.encode_special_tokens = False
        digest = hashlib.blake2b(json.dumps([self.fingerprint, text, files.special_tokens]).encode(), digest_size=8)
        self.fingerprint = digest.hexdigest()

    def prompt(self, messages: list[Message]) -> list[int]:
        """The tokens of ``messages`` and of the prefix of the assistant's answer."""
        return self._tokenizer.encode(self.template.render(messages, prompt=True), add_special_tokens=False).ids

    def encode(self, document: bytes | str) -> np.ndarray:
        """The tokens of a conversation, int32 (N,), with ``~id`` for tokens that are not the assistant's."""
        return self.encode_batch([document.encode() if isinstance(document, str) else document])[0]

    def encode_batch(self, documents: list[bytes]) -> list[np.ndarray]:
        rendered = [self.template.spans(json.loads(document)) for document in documents]
        size = None if self._row is None else _CHARACTERS * (self._row + 1)
        encoded = self._tokenizer.encode_batch([text[:size] for text, _ in rendered], add_special_tokens=False)
        return [self._cut(one, size, *it) for one, it in zip(encoded, rendered, strict=True)]

    def _cut(self, encoded: tokenizers.Encoding, size: int | None, text: str, spans: list[Span]) -> np.ndarray:
        """The tokens of ``text``, whose first ``size`` characters are ``encoded``. How a text is cut off changes the
        tokens next to its end: the kept ones lie in the first half."""
        if size is None or len(text) <= size:
            return _marked(encoded.ids, encoded.offsets, spans)
        last = self._row
        if len(encoded) <= last or encoded.offsets[last][1] > size // 2:
            size *= 2
            return self._cut(self._tokenizer.encode(text[:size], add_special_tokens=False), size, text, spans)
        ids, offsets = encoded.ids[: last + 1], encoded.offsets[: last + 1]
        marked = _marked(ids, offsets, spans)
        marked[last] = ids[last] if any(end > offsets[last][0] for _, end in spans) else ~ids[last]
        return marked


class PairTokenizer(ChatTokenizer):
    """`ChatTokenizer` of preference pairs: a document is the JSON of two conversations, of which ``encode`` gives
    ``~n``, the ``n`` tokens of the first, and those of the second."""

    def __init__(self, path: str | Path, row: int | None = None):
        super().__init__(path, row)
        self.fingerprint += "-pairs"

    def encode_batch(self, documents: list[bytes]) -> list[np.ndarray]:
        sides = [json.dumps(side).encode() for document in documents for side in json.loads(document)]
        found = super().encode_batch(sides)
        return [np.concatenate([[~len(a)], a, b]) for a, b in zip(found[::2], found[1::2], strict=True)]


def _marked(ids: list[int], offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """``ids``, with ``~id`` for tokens without a character in ``spans``, and for the first, which follows nothing."""
    ids, offsets = np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)
    counts = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        counts |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    counts[:1] = False
    return np.where(counts, ids, ~ids)
