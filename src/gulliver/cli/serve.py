"""``gulliver serve``, ``gulliver serve bench`` and ``gulliver chat``.

Nothing here imports torch at its top: ``--help`` reads this module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gulliver.errors import GulliverError, UsageError
from gulliver.options import SEED, Range, part_of, size_text
from gulliver.serve.http.options import Load, ServerOptions
from gulliver.serve.options import EngineOptions, ModelOptions

if TYPE_CHECKING:
    from gulliver.serve.http.load import RequestTiming
    from gulliver.serve.http.server import Server
    from gulliver.serve.llm import LLM


@dataclass(frozen=True)
class Start(ModelOptions, EngineOptions, ServerOptions):
    """Serves a language model through the OpenAI API, until Ctrl+C or SIGTERM.

    `gulliver serve bench --help`: a load generator for any such server.
    """

    model: tyro.conf.Positional[Path] = tyro.MISSING
    """Hugging Face folder of the model with its tokenizer, or a GGUF file."""


@dataclass(frozen=True)
class Bench(Load):
    """Sends requests to any server with the OpenAI API, and measures latency and throughput."""

    url: str = tyro.MISSING
    prompt: tuple[str, ...] = ()
    """Prompts to send instead of random words."""
    prompt_file: Path | None = None
    """Text file with a prompt on each line, instead of random words."""
    prompts: tyro.conf.Suppress[tuple[str, ...]] = ()
    json: bool = False
    """Print JSON, in seconds."""
    out: Path | None = None
    """File to write the JSON to."""


def start_command(config: Start) -> int:
    """Serves until Ctrl+C or SIGTERM."""
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
    """Prints the server's address and settings."""
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


def bench_command(config: Bench) -> int:
    """Sends a load, and prints latencies."""
    from gulliver.jobs.display import Display
    from gulliver.serve.http import generate_load

    load = replace(part_of(config, Load), prompts=config.prompt)
    if config.prompt_file is not None:
        load = replace(load, prompts=_prompts(config.prompt_file))
    errors = 0
    with Display("requests", config.requests) as display:

        def count(sample: RequestTiming) -> None:
            nonlocal errors
            errors += sample.error is not None
            display.advance(errors=str(errors))

        measured = generate_load(load, count)
    known = measured.json
    if config.out is not None:
        config.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(known) if config.json else "\n".join(measured.lines()))
    return 0 if known["answered"] else 1


def _prompts(file: Path) -> tuple[str, ...]:
    try:
        found = tuple(
            line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {file}: {error}") from None
    if not found:
        raise UsageError(f"--prompt-file {file} has no prompt: write one per line")
    return found


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
    """Replies to messages until the input ends."""
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
    """Yields the lines that the user types."""
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
