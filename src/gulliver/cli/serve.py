"""``gulliver serve`` and ``gulliver chat``.

Nothing here imports torch at its top: ``--help`` reads this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gulliver.errors import GulliverError
from gulliver.options import SEED, Range, part_of, size_text
from gulliver.serve.http.options import ServerOptions
from gulliver.serve.options import EngineOptions, ModelOptions

if TYPE_CHECKING:
    from gulliver.serve.http.server import Server
    from gulliver.serve.llm import LLM


@dataclass(frozen=True)
class Start(ModelOptions, EngineOptions, ServerOptions):
    """Serves a language model through the OpenAI API, until Ctrl+C or SIGTERM."""

    model: tyro.conf.Positional[Path] = tyro.MISSING
    """Hugging Face folder of the model with its tokenizer, or a GGUF file."""


def start_command(config: Start) -> int:
    from gulliver.serve.http import Server
    from gulliver.serve.llm import LLM

    options = part_of(config, ServerOptions)
    # Fails before a model is loaded.
    listener = options.listen()
    try:
        engine, given = part_of(config, EngineOptions), part_of(config, ModelOptions)
        model = LLM(config.model, options=engine, model_options=given)
        with model:
            name = config.model.resolve().name
            server = Server(model, options, name=name, listener=listener)
            _say(config, model, server, options)
            code = server.run()
            if server.dead is not None:
                raise GulliverError(server.dead)
            print("gulliver: the server has ended", file=sys.stderr, flush=True)
            return code
    finally:
        listener.close()


def _say(config: Start, model: LLM, server: Server, options: ServerOptions) -> None:
    facts = model.engine.runner.facts
    tokens = facts.blocks * facts.block_size
    size = "for all sequences, in at most half of the free memory"
    if config.kv_cache is not None or config.cache_tokens is not None:
        size = "as given"
    body = options.body_limit(facts.longest)
    chosen = "as given" if config.body_bytes else "by the context"
    lines = [
        f"gulliver: {server.limits.name} at {server.url}",
        f"  at most {facts.longest:,} tokens of prompt and completion ({facts.what}), "
        f"{config.sequences} concurrent sequences, {config.queue} waiting",
        f"  cache of {tokens:,} tokens ({size}); bodies of at most {size_text(body)} ({chosen})",
    ]
    if config.ranks > 1:
        lines.append(f"  {config.ranks} ranks: {config.pp_size} stages of {config.tp_size}")
    if config.speculation is not None:
        lines.append(f"  drafts by {config.speculation}, verified if predicted to be faster")
    if getattr(model.tokenizer, "chat_template", None) is None:
        lines.append("  no chat template: only /v1/completions is available")
    if options.host not in ("127.0.0.1", "localhost", "::1") and options.key is None:
        lines.append(
            "  anyone who can reach this address may send requests; --api-key requires a key"
        )
    print("\n".join(lines), file=sys.stderr, flush=True)


# ``gulliver chat``: a conversation in the terminal, or replies to messages passed as options.
#
# Nothing here imports torch at its top: ``--help`` reads this module.


@dataclass(frozen=True)
class ChatConfig(ModelOptions):
    """Chats with a language model, using its chat template; replies are streamed."""

    folder: tyro.conf.Positional[Path] = tyro.MISSING
    """Hugging Face folder of the model with its tokenizer, or a GGUF file."""
    prompt: tuple[str, ...] = ()
    """Message to reply to; several are replied to in turn, without a terminal."""
    system: str = ""
    """System prompt."""
    plain: bool = False
    """Continue each text without a chat template or history."""
    max_tokens: Annotated[int, Range(1, 2**20)] = 256
    """Maximum number of tokens of a reply."""
    temperature: Annotated[float, Range(0, 100)] = 0.7
    """Sampling temperature; 0 is greedy, 1 the model's own distribution."""
    top_p: Annotated[float, Range(0.001, 1)] = 1.0
    """Nucleus sampling: sample from the fewest tokens with this total probability."""
    seed: Annotated[int | None, SEED] = None
    """Sampling seed; by default a new one each time."""


def chat_command(config: ChatConfig) -> int:
    from gulliver.serve.llm import LLM
    from gulliver.serve.requests import chat_tokens

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
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _answer(model: LLM, tokens: list[int], config: ChatConfig) -> str:
    """Prints a reply as it is generated, and returns it."""
    from gulliver.serve.sampling import SamplingParams

    room = model.engine.runner.facts.longest - len(tokens)
    sampling = SamplingParams(
        # At least 1, so that a conversation that is too long is rejected with its length.
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
