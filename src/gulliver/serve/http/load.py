"""The load generator: sends requests and measures times."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from gulliver.errors import GulliverError
from gulliver.serve.http.options import Load


@dataclass
class RequestTiming:
    """Timing of one request; times are seconds on one clock."""

    # Time at which it should be sent.
    due: float
    sent: float = 0.0
    # Times at which text or tokens arrived.
    heard: list[float] = field(default_factory=list)
    # Time at which its response was complete, or failed.
    ended: float = 0.0
    # Tokens of the prompt, as the server counts them.
    prompt: int = 0
    # Tokens of the completion, as the server counts them.
    tokens: int = 0
    # Short name of the error; None if there was none.
    error: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds from the request to the first text."""
        return self.heard[0] - self.sent if self.heard else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks of text."""
        return [b - a for a, b in zip(self.heard, self.heard[1:], strict=False)]


@dataclass(frozen=True)
class Measured:
    """A load and its results.

    Attributes:
        samples: sent requests.
        rate: requested requests per second; infinite if all are sent immediately.
        seed: seed of arrivals and prompts.
    """

    samples: Sequence[RequestTiming]
    rate: float
    seed: int

    @property
    def errors(self) -> dict[str, int]:
        """Numbers of failed requests, by error."""
        return dict(Counter(s.error for s in self.samples if s.error is not None).most_common())

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last response."""
        if not self.samples:
            return 0.0
        return max(s.ended for s in self.samples) - min(s.sent for s in self.samples)

    @property
    def json(self) -> dict[str, Any]:
        """All results; times in seconds, null if not measured."""
        good = [s for s in self.samples if s.error is None]
        gaps = [gap for s in good for gap in s.gaps]
        seconds = self.seconds
        return {
            "requests": len(self.samples),
            "answered": len(good),
            "errors": self.errors,
            "seed": self.seed,
            "rate_asked": None if math.isinf(self.rate) else self.rate,
            "seconds": seconds,
            "requests_per_second": _share(len(good), seconds),
            "tokens_per_second": _share(sum(s.tokens for s in good), seconds),
            "prompt_tokens": sum(s.prompt for s in good),
            "answer_tokens": sum(s.tokens for s in good),
            "first_token_seconds": _quantiles([s.first for s in good if s.first is not None]),
            "between_tokens_seconds": _quantiles(gaps),
            "request_seconds": _quantiles([s.ended - s.sent for s in good]),
            # If this is not small, the load generator itself was too slow.
            "sent_late_seconds": _quantiles([s.sent - s.due for s in self.samples]),
        }

    def lines(self) -> list[str]:
        """The results as a human-readable table, one string per line."""
        known = self.json
        asked = "all at once" if math.isinf(self.rate) else f"{self.rate:g} a second, Poisson"
        made = [
            f"{known['answered']} of {known['requests']} requests answered in "
            f"{self.seconds:.2f} s ({asked}, seed {self.seed})",
            f"{_number(known['requests_per_second'])} requests/s, "
            f"{_number(known['tokens_per_second'])} tokens/s; {known['prompt_tokens']} tokens in, "
            f"{known['answer_tokens']} out",
            f"{'ms':<22}{'p50':>10}{'p90':>10}{'p99':>10}{'most':>10}{'of':>9}",
        ]
        for name, key in _ROWS.items():
            row_values = known[key]
            row = "".join(
                f"{_number(row_values[p], 1000):>10}" for p in ("p50", "p90", "p99", "most")
            )
            made.append(f"{name:<22}{row}{row_values['count']:>9}")
        return made + [f"error: {count} x {error}" for error, count in self.errors.items()]


_ROWS = {
    "first token": "first_token_seconds",
    "between tokens": "between_tokens_seconds",
    "whole answer": "request_seconds",
    "sent late": "sent_late_seconds",
}


def _share(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _quantiles(values: Sequence[float]) -> dict[str, float | int | None]:
    names, shares = ("p50", "p90", "p99", "most"), (0.5, 0.9, 0.99, 1.0)
    found: list[float | None] = [None] * len(names)
    if values:
        found = np.quantile(values, shares, method="inverted_cdf").tolist()
    return {"count": len(values), **dict(zip(names, found, strict=True))}


def _number(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.1f}"


# `generate_load`: sends randomly arriving requests to any server with the OpenAI API.
#
# Arrivals are a Poisson process: they do not wait for responses, so the results show when a server
# falls behind. Random times, lengths and words are determined by the seed. Times are measured when
# chunks of text arrive; token counts are those that the server reports.


_COMMON = (
    "the of and to in a is that it was for on are with as they at be this from have or by one had "
    "not but what all were when we there can an your which said if do will each about how up out"
)
WORDS = _COMMON.split()
"""Words of generated prompts; most tokenizers encode each as one or two tokens."""


@dataclass(frozen=True)
class Arrival:
    """A request and the time to send it."""

    at: float
    prompt: str
    # Maximum tokens of the completion.
    max_tokens: int


def arrivals(load: Load) -> list[Arrival]:
    """Generates all requests of a load."""
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
    """Sends a load and waits for the responses.

    Args:
        load: load to send.
        progress: called after each request.

    Returns:
        The results; after Ctrl+C, those of the requests sent until then.

    Raises:
        GulliverError: the server is unreachable, or lists no model.
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
        raise GulliverError(f"{where} lists no model: set --model") from None


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
        sample.error = "a response that does not follow the OpenAI API"
    sample.ended = time.perf_counter()


async def _listen(answer: httpx.Response, sample: RequestTiming) -> None:
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
    # Reasoning models return their reasoning in a separate field.
    said = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return said or ""


def _message(text: str) -> str:
    """Extracts an error's message as one line."""
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())
