"""A server on a tiny model for tests, with a runner that can be held, broken and failed."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from gulliver.serve import LLM, EngineOptions
from gulliver.serve.http import Server, ServerOptions
from tests.patience import patient
from tests.serve.test_serving import small
from tests.texts import tokenizer_of


class Steered:
    """A runner whose results wait while it is held, or are broken once.

    Attributes:
        broken: token; logits of sequences whose span begins with it are not finite.
        fails: error that the next result is instead.
        restarted: makes the runner in the place of one that is lost.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.broken: int | None = None
        self.fails: Exception | None = None
        self.restarted: Any = None
        self.reached = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self._spans: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, batch: Any) -> None:
        self._spans = batch.spans
        self.runner.submit(batch)

    def collect(self) -> torch.Tensor:
        logits, row = self.runner.collect(), 0
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        for span in self._spans:
            if self.broken in span.tokens:
                logits = logits.clone()
                logits[row : row + span.outputs] = torch.nan
            row += span.outputs
        self.reached.set()
        assert self._free.wait(patient(60))
        return logits

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the engine does not come past its next step."""
        self._free.clear()
        self.reached.clear()
        try:
            yield
        finally:
            self._free.set()


@contextmanager
def serving(
    sequences: int = 16, cache_tokens: int = 2048, **options: Any
) -> Iterator[tuple[Server, Steered, LLM]]:
    """Serves a copy of the small model as ``tiny``."""
    engine = EngineOptions(64, sequences)
    llm = LLM(copy.deepcopy(small()), tokenizer_of(), cache_tokens=cache_tokens, options=engine)
    steered = llm.engine.runner = Steered(llm.engine.runner)
    with llm:
        known = {"port": 0, **options}
        server = Server(llm, ServerOptions(**known), "tiny")
        with server:
            yield server, steered, llm


@contextmanager
def reference() -> Iterator[LLM]:
    """The same model without a server."""
    model = copy.deepcopy(small())
    with LLM(model, tokenizer_of(), cache_tokens=2048, options=EngineOptions(64, 16)) as llm:
        yield llm


def idle(server: Server) -> dict[str, int]:
    """The server's numbers once nothing is under way."""
    end = time.monotonic() + patient(30)
    while time.monotonic() < end:
        counts = {**server.counts(), **engine_counts(server)}
        if not (counts["answers"] or counts["running"] or counts["waiting"]):
            return counts
        time.sleep(0.005)
    raise AssertionError(f"still busy: {server.counts()}")


def engine_counts(server: Server) -> dict[str, int]:
    """The engine's numbers between two steps; those that a server tells are of its last step."""
    worker, told = server._worker, SimpleQueue[dict[str, int]]()
    worker._commands.put(lambda: told.put(worker._engine.counts()))
    return told.get(timeout=patient(30))


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    return host, int(port)


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """Bytes of a request."""
    made = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(made)}\r\n\r\n"
    )
    return head.encode() + made


async def within(work: Awaitable[Any], seconds: float = 30) -> Any:
    """Waits, not forever."""
    return await asyncio.wait_for(work, patient(seconds))
