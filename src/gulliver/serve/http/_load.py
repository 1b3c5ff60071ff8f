"""`generate_load`: requests that arrive as people do, at any server of OpenAI's interface.

Arrivals are a Poisson process: they do not wait for answers, so that a server that falls behind is
seen to. All that is random, times, lengths and words, follows from the seed. What is measured is
when pieces of text come; numbers of tokens are those that the server tells.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from gulliver.errors import GulliverError
from gulliver.serve.http._limits import Load
from gulliver.serve.http._measured import Measured, RequestTiming

_COMMON = (
    "the of and to in a is that it was for on are with as his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find use "
    "may water long little very after words called just where most know"
)
WORDS = _COMMON.split()
"""Words of prompts: each is a token or two of most tokenizers."""


@dataclass(frozen=True)
class Arrival:
    """A request that will be sent."""

    at: float
    prompt: str
    # Most tokens of the answer.
    max_tokens: int


def arrivals(load: Load) -> list[Arrival]:
    """Draws all requests of a load."""
    random_ = random.Random(load.seed)
    at, made = 0.0, []
    for number in range(load.requests):
        if number:
            at += random_.expovariate(load.rate) if math.isfinite(load.rate) else 0.0
        words = random_.randint(*load.prompt_words)
        text = " ".join(random_.choice(WORDS) for _ in range(words))
        if load.prompts:
            text = load.prompts[number % len(load.prompts)]
        made.append(Arrival(at, text, random_.randint(*load.max_tokens)))
    return made


def generate_load(
    load: Load, progress: Callable[[RequestTiming], None] = lambda _: None
) -> Measured:
    """Sends a load and waits for its answers.

    Args:
        load: what to ask.
        progress: called after each request.

    Returns:
        What was seen; of what was sent so far where Ctrl+C ended it.

    Raises:
        GulliverError: the server is not there, or tells no model.
    """
    samples: list[RequestTiming] = []
    try:
        asyncio.run(_send_all(load, samples, progress))
    except KeyboardInterrupt:
        now = time.perf_counter()
        for sample in samples:
            if not sample.ended:
                sample.ended, sample.error = now, "interrupted"
    return Measured([s for s in samples if s.sent], load.rate, load.seed)


async def _send_all(
    load: Load, samples: list[RequestTiming], progress: Callable[[RequestTiming], None]
) -> None:
    headers = {"authorization": f"Bearer {load.key}"} if load.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    # The semaphore is the only limit on requests in flight.
    free = asyncio.Semaphore(load.connections)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=load.timeout) as client:
        model = load.model or await _model(client, load)
        begin = time.perf_counter()
        tasks = []
        for arrival in arrivals(load):
            samples.append(RequestTiming(begin + arrival.at))
            await asyncio.sleep(max(0.0, begin + arrival.at - time.perf_counter()))
            await free.acquire()
            task = asyncio.ensure_future(_send(client, load, model, arrival, samples[-1]))

            def ended(_: object, sample: RequestTiming = samples[-1]) -> None:
                free.release()
                progress(sample)

            task.add_done_callback(ended)
            tasks.append(task)
        await asyncio.gather(*tasks)


async def _model(client: httpx.AsyncClient, load: Load) -> str:
    where = f"{load.base}/models"
    try:
        answer = await client.get(where)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        said = _message(error.response.text)
        raise GulliverError(f"{where} answers {error.response.status_code}: {said}") from None
    except httpx.HTTPError as error:
        raise GulliverError(f"{where} does not answer: {error or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise GulliverError(f"{where} names no model: name one with --model") from None


def _body(load: Load, model: str, arrival: Arrival) -> dict[str, Any]:
    asked = (
        {"prompt": arrival.prompt}
        if load.endpoint == "completions"
        else {"messages": [{"role": "user", "content": arrival.prompt}]}
    )
    made = {"model": model, **asked, "max_tokens": arrival.max_tokens, "stream": True}
    made |= {"temperature": load.temperature, "stream_options": {"include_usage": True}}
    return {**made, "ignore_eos": True} if load.ignore_eos else made


async def _send(
    client: httpx.AsyncClient, load: Load, model: str, arrival: Arrival, sample: RequestTiming
) -> None:
    path = "completions" if load.endpoint == "completions" else "chat/completions"
    sample.sent = time.perf_counter()
    try:
        body = _body(load, model, arrival)
        async with client.stream("POST", f"{load.base}/{path}", json=body) as answer:
            if answer.status_code != 200:
                said = _message((await answer.aread()).decode("utf-8", "replace"))
                sample.error = f"{answer.status_code} {said}"[:200]
            else:
                await _listen(answer, sample)
    except httpx.HTTPError as error:
        sample.error = type(error).__name__
    except (ValueError, KeyError, TypeError):
        sample.error = "an answer that is not of OpenAI's interface"
    sample.ended = time.perf_counter()


async def _listen(answer: httpx.Response, sample: RequestTiming) -> None:
    """Reads a stream (server-sent events)."""
    done = False
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            done = True
            continue
        piece = json.loads(data)
        if piece.get("error"):
            sample.error = _message(data)[:200]
            return
        if piece.get("usage"):
            sample.prompt = piece["usage"]["prompt_tokens"]
            sample.tokens = piece["usage"]["completion_tokens"]
        if any(_text(choice) for choice in piece.get("choices", ())):
            sample.heard.append(time.perf_counter())
    if not done:
        sample.error = "a stream that ended early"


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    # Models that think aloud say so in a field of its own.
    said = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return said or ""


def _message(text: str) -> str:
    """The message of an error, in one line."""
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())
