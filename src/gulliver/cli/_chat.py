"""``gulliver chat``: a conversation in the terminal, or answers to messages given as options.

Nothing here imports torch at its top: ``--help`` reads this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gulliver.cli._serve import loading
from gulliver.options import SEED, Range, part_of
from gulliver.serve._ways import EngineOptions, ModelOptions

if TYPE_CHECKING:
    from gulliver.serve import LLM


@dataclass(frozen=True)
class ChatConfig(ModelOptions):
    """Talks with a language model, by its chat template; answers come as they are made."""

    folder: tyro.conf.Positional[Path] = Path()
    """Hugging Face folder of the model, with its tokenizer."""
    prompt: tuple[str, ...] = ()
    """Message to answer; several are answered in turn, without a terminal."""
    system: str = ""
    """What the model is told before the first message."""
    plain: bool = False
    """Continue each text as it is: no chat template, no history."""
    max_tokens: Annotated[int, Range(1, 2**20)] = 256
    """Most tokens of an answer."""
    temperature: Annotated[float, Range(0, 100)] = 0.7
    """0 takes the likeliest token, 1 the model's own distribution."""
    top_p: Annotated[float, Range(0.001, 1)] = 1.0
    """Draw among the fewest tokens that have this probability together."""
    seed: Annotated[int | None, SEED] = None
    """Seed of what is drawn; a new one each time by default."""


def chat_command(config: ChatConfig, arguments: list[str]) -> int:
    """Answers messages until there are no more."""
    del arguments
    from gulliver.serve import LLM, chat_tokens

    with loading(config.folder):
        options = EngineOptions(sequences=1)
        model = LLM(config.folder, options=options, model_options=part_of(config, ModelOptions))
    messages: list[dict[str, str]] = []
    if config.system:
        messages.append({"role": "system", "content": config.system})
    with model:
        for text in config.prompt or _typed():
            if config.plain:
                _answer(model, model.engine.tokens_of(text), config)
                continue
            messages.append({"role": "user", "content": text})
            answer = _answer(model, chat_tokens(model.tokenizer, messages), config)
            messages.append({"role": "assistant", "content": answer})
    return 0


def _typed() -> Iterator[str]:
    """Lines that the user types, until the input ends."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _answer(model: LLM, tokens: list[int], config: ChatConfig) -> str:
    """Prints an answer as it is made, and returns it."""
    from gulliver.serve import SamplingParameters

    room = model.engine.runner.facts.longest - len(tokens)
    sampling = SamplingParameters(
        # At least 1, so that a conversation that is too long is refused with its length.
        max_tokens=max(1, min(config.max_tokens, room)),
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    text = ""
    for event in model.stream(tokens, sampling):
        print(event.text, end="", flush=True)
        text += event.text
    print(flush=True)
    return text
