"""Text from the model of a run: ``stepgraph sample``, and samples while it trains."""

import math
from pathlib import Path

import numpy as np
from torch import nn

from stepgraph.config.command_line import first_word, parse
from stepgraph.config.commands import SampleOptions
from stepgraph.config.files import run_config
from stepgraph.config.train import TrainConfig
from stepgraph.models import family_of
from stepgraph.models.generate import Choose, generate, sampler
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.data import ChatTokenizer, Tokenizer, open_tokenizer
from stepgraph.train.data.tokenizer import TokenizerFiles
from stepgraph.train.saving import load_trained

#: Of samples in a run.
NEW_TOKENS, TEMPERATURE = 64, 0.8


def check(options: SampleOptions) -> None:
    """Raises ValueError, in one line, for the first option that cannot be right."""
    if options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={options.max_new_tokens} must be above 0")
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        raise ValueError(f"temperature={options.temperature} must be 0 or more")
    if not 0 < options.top_p <= 1:
        raise ValueError(f"top_p={options.top_p} must be in (0, 1]")
    if abs(options.seed) >= 1 << 63:
        raise ValueError(f"seed={options.seed} must be below 2^63")


def main(argv: list[str]) -> int:
    """Runs ``stepgraph sample ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    how = 'sample takes a run folder first: write stepgraph sample RUN --prompt "text"'
    name, words = first_word(argv, how, "")
    (options,) = parse(words, "stepgraph sample RUN", SampleOptions(), description=SampleOptions.__doc__)
    check(options)
    run = Path(name)
    config = run_config(run)
    writer = Writer(config.tokenizer, options.chat)
    prompt = writer.prompt(options.prompt)
    most = min(options.max_new_tokens, room(config, prompt))
    model, _ = load_trained(run, config, options.device)
    choose = sampler(options.temperature, options.top_p, options.seed)
    text = writer.write(model, prompt, most, choose)
    print(text if options.chat else options.prompt + text)
    return 0


class Samples:
    """The samples of a run: every ``sample_every`` steps, and at the end. They change no bit of the run.

    Raises ``ValueError``, in one line, as `Writer` does, for steps without a validation, a mesh that splits the model,
    and a prompt that the model has no room for.
    """

    def __init__(self, config: TrainConfig, chat: bool, model: nn.Module, ranks: Ranks):
        self._config, self._model, self._ranks = config, model, ranks
        if not config.sample_every and config.sample_prompt:
            raise ValueError("sample_prompt needs samples: add --sample-every")
        if config.sample_every:
            _check_every(config.sample_every, config.val_every)
            if (spec := config.mesh_spec) and spec.cp * spec.tp * spec.pp * spec.ep > 1:
                raise ValueError(
                    f"sample_every needs whole models, and mesh={config.mesh} splits them by cp, tp, pp or ep: drop "
                    "it, and use stepgraph sample RUN"
                )
            self._writer = Writer(config.tokenizer, chat)
            self._prompt = self._writer.prompt(config.sample_prompt)
            self._room = room(config, self._prompt)

    def after(self, step: int, last: bool = False) -> str | None:
        """What the model writes after the prompt after ``step``, ``last`` of the run or not; None if none is due. All
        ranks of a mesh call."""
        if not self._config.sample_every or (step % self._config.sample_every and not last):
            return None
        draw = sampler(TEMPERATURE, seed=self._config.seed)
        self._model.eval()
        text = self._writer.write(
            self._model,
            self._prompt,
            min(NEW_TOKENS, self._room),
            lambda logits: self._ranks.first(lambda: draw(logits)),
        )
        self._model.train()
        return text


def _check_every(every: int, val_every: int) -> None:
    if not val_every:
        raise ValueError(f"sample_every={every} is at validations and val_every=0: try --val-every {every}")
    if every % val_every:
        nearest = -(-every // val_every) * val_every
        raise ValueError(
            f"sample_every={every} must be a multiple of val_every={val_every}, as samples are written at validations: "
            f"try --sample-every {nearest}"
        )


def room(config: TrainConfig, prompt: list[int]) -> int | float:
    """How many tokens the model takes after ``prompt``; ``ValueError`` for none."""
    longest = family_of(config.model).longest(config.model) or math.inf
    if len(prompt) >= longest:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the model takes {longest}: use a shorter one")
    return longest - len(prompt)


class Writer:
    """Text with a model, by the tokenizer that ``--tokenizer`` names; ``chat``: answers to a user's messages.

    Raises ``ValueError``, in one line, as `open_tokenizer` does, and for ``chat`` without a chat template.
    """

    def __init__(self, tokenizer: str, chat: bool):
        if chat and tokenizer == "bytes":
            raise ValueError("chat needs a tokenizer with a chat template, and the run's is bytes: leave it out")
        self.tokenizer: Tokenizer = ChatTokenizer(tokenizer) if chat else open_tokenizer(tokenizer)
        self._stop = {self.tokenizer.eos_id, *TokenizerFiles(tokenizer).ends}

    def prompt(self, text: str) -> list[int]:
        """The tokens before the model's own. A document begins, as in training, after an end of text."""
        if isinstance(self.tokenizer, ChatTokenizer):
            return self.tokenizer.prompt([{"role": "user", "content": text}])
        return [self.tokenizer.eos_id, *self.tokenizer.encode(text).tolist()]

    def write(self, model: nn.Module, prompt: list[int], n: int, choose: Choose) -> str:
        """The text of up to ``n`` tokens after ``prompt``."""
        known = self.tokenizer.vocab_size  # models have rows beyond, which no text has trained
        tokens = generate(model, prompt, n, lambda logits: choose(logits[:known]), self._stop)
        return self.tokenizer.decode(np.array(list(tokens), np.int64))
