"""``gulliver serve``: a server of OpenAI's interface, and a generator of load for any such server.

Nothing here imports torch at its top: ``--help`` reads this module.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gulliver.cli._placement import Placement, loading
from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_1, SEED, Options, Range, byte_size, size_text

if TYPE_CHECKING:
    from gulliver.serve import LLM
    from gulliver.serve.http import Sample, Server, ServerOptions

SECONDS = Range(0.1, 3600)


@dataclass(frozen=True)
class Start(Options):
    """Serves a language model to clients of OpenAI's interface, until Ctrl+C or SIGTERM.

    `gulliver serve bench --help`: a generator of load for any such server.
    """

    model: Path = tyro.MISSING
    """Hugging Face folder of the model, with its tokenizer."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets other machines in."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen at; 0 for any that is free."""
    name: str | None = None
    """Name that clients give the model; that of the folder by default."""
    api_key: str | None = None
    """Key that clients must send; the variable GULLIVER_API_KEY says it where no list shows it."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the weights; that of the files by default."""
    quantize: Literal["int8", "int8_dynamic", "int4"] | None = None
    """Read the weights into int8 or int4."""
    context: Annotated[int | None, Range(2, 2**24)] = None
    """Most tokens of prompt and answer; the model's own by default."""
    cache: str | None = None
    """Memory for keys and values, such as 4GiB; by default what sequences need, at most half."""
    sequences: Annotated[int, Range(1, 4096)] = 64
    """Answers that run at a time."""
    step_tokens: Annotated[int, Range(1, 2**20)] = 512
    """Tokens of a batch; longer prompts are computed in chunks."""
    queue: Annotated[int, Range(0, 2**20)] = 256
    """Answers that may wait beside those that run; more are refused with 429."""
    max_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Most tokens of an answer; what the context leaves by default."""
    most_n: Annotated[int, Range(1, 128)] = 16
    """Most answers to a prompt."""
    max_body: str | None = None
    """Largest body of a request, such as 1MiB; by default 64 KiB and 32 bytes a token."""
    connections: Annotated[int, Range(1, 2**20)] = 1000
    """Open connections; more are refused with 503."""
    body_seconds: Annotated[float, SECONDS] = 30.0
    """Seconds in which a request must have come."""
    stall_seconds: Annotated[float, SECONDS] = 30.0
    """Seconds that a client may leave its answer unread."""
    drain_seconds: Annotated[float, Range(0, 86400)] = 30.0
    """Seconds that running requests get after SIGTERM or Ctrl+C."""
    placement: Placement = field(default_factory=Placement)


@dataclass(frozen=True)
class Bench(Options):
    """Sends requests to any server of OpenAI's interface, and says how long answers take."""

    url: str = tyro.MISSING
    """Address of the server, with or without /v1."""
    model: str | None = None
    """Name of the model; the first that the server names by default."""
    requests: Annotated[int, AT_LEAST_1] = 100
    """Requests to send."""
    rate: Annotated[float, Range(0, open_below=True)] | None = None
    """Requests a second, as a Poisson process; all at once by default."""
    prompt_words: tuple[int, int] = (16, 256)
    """Least and most words of a prompt, drawn at random."""
    max_tokens: tuple[int, int] = (16, 128)
    """Least and most tokens of an answer."""
    prompts: Path | None = None
    """File of prompts, one a line, instead of random words."""
    endpoint: Literal["completions", "chat"] = "completions"
    """What is asked: completions or chats."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """Temperature of the answers."""
    ignore_eos: bool = False
    """Ask for answers of full length; not all servers know it."""
    seed: Annotated[int, SEED] = 0
    """Seed of arrivals, lengths and words."""
    api_key: str | None = None
    """Key of the server; GULLIVER_API_KEY by default."""
    connections: Annotated[int, Range(1, 2**20)] = 1000
    """Most requests under way."""
    timeout: Annotated[float, Range(0.1, 86400)] = 120.0
    """Seconds without a byte after which a request has failed."""
    json: bool = False
    """Print JSON, in seconds."""
    out: Path | None = None
    """File to write the JSON to."""


ServeAction = (
    Annotated[Start, tyro.conf.subcommand("start", prefix_name=False)]
    | Annotated[Bench, tyro.conf.subcommand("bench", prefix_name=False)]
)
SERVE_ACTIONS = ("start", "bench")


@dataclass(frozen=True)
class ServeConfig(Options):
    """Serves a language model; ``gulliver serve --model FOLDER`` means start."""

    action: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[ServeAction]] = tyro.MISSING


def serve_command(config: ServeConfig, arguments: list[str]) -> int:
    """Serves, or sends a load."""
    del arguments
    if isinstance(config.action, Bench):
        return _bench(config.action)
    return _start(config.action)


def _start(config: Start) -> int:
    from gulliver.serve.http import Server, ServerOptions

    options = ServerOptions(
        host=config.host,
        port=config.port,
        name=config.name,
        api_key=config.api_key,
        queue=config.queue,
        most_n=config.most_n,
        max_tokens=config.max_tokens,
        body_bytes=None if config.max_body is None else byte_size("--max-body", config.max_body),
        connections=config.connections,
        body_seconds=config.body_seconds,
        stall_seconds=config.stall_seconds,
        drain_seconds=config.drain_seconds,
    )
    # Before a model is loaded in vain.
    listener = options.listen()
    try:
        with _model(config) as model:
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


def _model(config: Start) -> LLM:
    from gulliver.serve import LLM, EngineOptions

    with loading(config.model):
        return LLM(
            config.model,
            dtype=config.dtype,
            quantize=config.quantize,
            context=config.context,
            cache_bytes=None if config.cache is None else byte_size("--cache", config.cache),
            options=EngineOptions(max(config.step_tokens, config.sequences), config.sequences),
            **config.placement.arguments(),
        )


def _say(config: Start, model: LLM, server: Server, options: ServerOptions) -> None:
    """Says where the server is, and what was chosen for it."""
    facts = model.engine.runner.facts
    tokens = facts.blocks * facts.block_size
    given = "as given" if config.cache else "for all of them, in at most half of the free memory"
    body = options.body_limit(facts.longest)
    chosen = "as given" if config.max_body else "by the context"
    lines = [
        f"gulliver: {server.limits.name} at {server.url}",
        f"  at most {facts.longest:,} tokens of prompt and answer ({server.limits.what}), "
        f"{config.sequences} answers at a time, {config.queue} waiting",
        f"  cache of {tokens:,} tokens ({given}); bodies of at most {size_text(body)} ({chosen})",
    ]
    lines += _placed(config.placement, model)
    if getattr(model.tokenizer, "chat_template", None) is None:
        lines.append("  no chat template: /v1/chat/completions refuses, /v1/completions answers")
    if options.host not in ("127.0.0.1", "localhost", "::1") and options.key is None:
        lines.append("  whoever reaches this address may ask: --api-key lets in who knows it")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _placed(placement: Placement, model: LLM) -> list[str]:
    """Says over what the model lies, and that drafts may rest."""
    lines = []
    if (ranks := placement.tensor * placement.pipeline) > 1:
        stages = f"{placement.pipeline} stage{'s' * (placement.pipeline > 1)}"
        lines.append(
            f"  {ranks} ranks of this machine: {stages} of {placement.tensor}; one that is lost is "
            "started again"
        )
    if model.engine.drafter is not None:
        lines.append(
            f"  drafts by {placement.speculation}, verified where that is predicted to pay; "
            "/metrics counts drafted_tokens and accepted_tokens"
        )
    return lines


def _bench(config: Bench) -> int:
    from gulliver.serve.http import Load, ServerOptions, generate_load

    load = Load(
        url=config.url,
        model=config.model,
        requests=config.requests,
        rate=math.inf if config.rate is None else config.rate,
        prompt_words=config.prompt_words,
        max_tokens=config.max_tokens,
        prompts=_prompts(config.prompts),
        endpoint=config.endpoint,
        temperature=config.temperature,
        ignore_eos=config.ignore_eos,
        seed=config.seed,
        api_key=ServerOptions(api_key=config.api_key).key,
        connections=config.connections,
        timeout=config.timeout,
    )
    with _Progress(config.requests) as progress:
        measured = generate_load(load, progress.count)
    known = measured.json
    if config.out is not None:
        config.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(known) if config.json else "\n".join(measured.lines()))
    return 0 if known["answered"] else 1


def _prompts(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        found = tuple(
            line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise GulliverError(f"--prompts {file}: {error}") from None
    if not found:
        raise GulliverError(f"--prompts {file} has no prompt: write one a line")
    return found


class _Progress:
    """A bar on standard error, where that is a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns: list[Any] = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        columns.append(TextColumn("{task.fields[errors]} errors"))
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("requests", total=total, errors=0)
        self._errors = 0

    def count(self, sample: Sample) -> None:
        """Counts a request that has ended."""
        self._errors += sample.error is not None
        self._bar.update(self._task, advance=1, errors=self._errors)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
