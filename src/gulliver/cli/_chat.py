"""``gulliver chat``: a conversation in the terminal, or answers to messages given as options."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gulliver.cli._options import ChatConfig
from gulliver.cli._placement import loading
from gulliver.serve import LLM, EngineOptions, SamplingParameters, chat_tokens


def chat_command(config: ChatConfig, arguments: list[str]) -> int:
    """Answers messages until there are no more."""
    del arguments
    options = EngineOptions(sequences=1)
    with loading(config.folder):
        model = LLM(
            config.folder,
            dtype=config.dtype,
            quantize=config.quantize,
            context=config.context,
            options=options,
            **config.placement.arguments(),
        )
    messages: list[dict[str, str]] = []
    if config.system:
        messages.append({"role": "system", "content": config.system})
    with model:
        for said in config.prompt or _typed():
            if config.plain:
                _answer(model, model.engine.tokens_of(said), config)
                continue
            messages.append({"role": "user", "content": said})
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
    room = model.engine.runner.facts.longest - len(tokens)
    # At least 1, so that a conversation that is too long is refused with its length.
    asked = SamplingParameters(
        max_tokens=max(1, min(config.max_tokens, room)),
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    text = ""
    for event in model.stream(tokens, asked):
        print(event.text, end="", flush=True)
        text += event.text
    print(flush=True)
    return text
