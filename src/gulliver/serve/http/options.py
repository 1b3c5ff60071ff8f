"""Options of the server and the load generator; imports neither torch nor FastAPI nor httpx."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field
from typing import Annotated, Literal

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_1, SEED, Options, Range, byte_size

KEY_VARIABLE = "GULLIVER_API_KEY"
"""Environment variable with the key, where no option gives it."""
BODY_BASE, BODY_TOKEN = 64 * 1024, 32
"""Bytes of a body excluding its prompt, and per token of the prompt, escapes included."""
PROBE_S = 15
"""Seconds without a byte after which the kernel asks whether a client is there."""
UNREAD_BYTES = 128 * 1024
"""Bytes that the kernel keeps for a client that has not read them."""


@dataclass(frozen=True)
class ServerOptions(Options):
    """Limits of a server; every limit is finite.

    Attributes:
        host: Address to listen at; 0.0.0.0 lets other machines in.
        port: Port to listen at; 0 for any that is free.
        name: Name that clients give the model; that of the folder by default.
        api_key: Key that clients must send; the variable GULLIVER_API_KEY says it where no list
            of processes shows it.
        queue: Requests that may wait while others run; more get status 429.
        most_n: Most answers to a prompt.
        max_tokens: Most tokens of an answer; what the context leaves by default.
        body_bytes: Largest body of a request, such as 1MiB; by default 64 KiB and 32 bytes a token.
        connections: Open connections; while there are more, requests are answered with 503.
        header_seconds: Seconds in which the head of a first request must have come.
        body_seconds: Seconds in which its body must have come.
        idle_seconds: Seconds that a connection stays open between requests.
        stall_seconds: Seconds that a client may leave its answer unread.
        drain_seconds: Seconds that running requests get after SIGTERM or Ctrl+C.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    queue: Annotated[int, Range(0, 2**20)] = 256
    most_n: Annotated[int, Range(1, 128)] = 16
    max_tokens: Annotated[int | None, AT_LEAST_1] = None
    body_bytes: Annotated[int | str | None, Range(1024)] = None
    connections: Annotated[int, Range(1, 2**20)] = 1000
    header_seconds: Annotated[float, Range(0.1, 3600)] = 10.0
    body_seconds: Annotated[float, Range(0.1, 3600)] = 30.0
    idle_seconds: Annotated[float, Range(0.1, 86400)] = 60.0
    stall_seconds: Annotated[float, Range(0.1, 3600)] = 30.0
    drain_seconds: Annotated[float, Range(0, 86400)] = 30.0

    def check_combinations(self) -> None:
        """Rejects a key that no client could send."""
        super().check_combinations()
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise GulliverError("the API key is empty or not ASCII: give letters and digits")

    @property
    def key(self) -> str | None:
        """Key that clients must send: from the option, else the environment."""
        return self.api_key or os.environ.get(KEY_VARIABLE) or None

    def body_limit(self, context: int) -> int:
        """Maximum body bytes, for sequences of up to `context` tokens."""
        if self.body_bytes is not None:
            return byte_size("body_bytes", self.body_bytes)
        return BODY_BASE + BODY_TOKEN * context

    def listen(self) -> socket.socket:
        """Binds the port; no connection is accepted yet.

        Raises:
            GulliverError: the port is in use, or the address is not one of this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        # Connections of a server that has ended may keep the port for a minute.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these. A client whose machine is gone sends nothing, not even a FIN:
        # the kernel finds out by probes, or by what is neither acknowledged nor taken in time.
        # It would keep megabytes for a client that does not read.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
        probes = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
        probes["TCP_USER_TIMEOUT"] = int(self.stall_seconds * 1000)
        for name, value in probes.items():
            if hasattr(socket, name):  # Linux has all of them, other systems some
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        try:
            made.bind((self.host, self.port))
        except OSError as error:
            made.close()
            raise GulliverError(
                f"{self.host}:{self.port} cannot be listened at ({error.strerror}): name another "
                "port, 0 for any that is free"
            ) from None
        return made


@dataclass(frozen=True)
class Load(Options):
    """A load for any server of OpenAI's interface.

    Attributes:
        url: Address of the server, with or without /v1.
        model: Name of the model; the first that the server names by default.
        requests: Requests to send.
        rate: Requests a second, as a Poisson process; all at once by default.
        prompt_words: Least and most words of a prompt, drawn at random.
        max_tokens: Least and most tokens of an answer.
        prompts: Prompts to send in turns, instead of random words.
        endpoint: What is asked: completions or chats.
        temperature: Temperature of the answers.
        ignore_eos: Ask for answers of full length; not all servers know it.
        seed: Seed of arrivals, lengths and words.
        api_key: Key of the server; GULLIVER_API_KEY by default.
        connections: Most requests in flight; later ones are sent late.
        timeout: Seconds without a byte after which a request has failed.
    """

    url: str
    model: str | None = None
    requests: Annotated[int, AT_LEAST_1] = 100
    rate: Annotated[float, Range(0, math.inf, open_below=True)] = math.inf
    prompt_words: tuple[int, int] = (16, 256)
    max_tokens: tuple[int, int] = (16, 128)
    prompts: tuple[str, ...] = ()
    endpoint: Literal["completions", "chat"] = "completions"
    temperature: Annotated[float, Range(0, 100)] = 0.0
    ignore_eos: bool = False
    seed: Annotated[int, SEED] = 0
    api_key: str | None = field(default=None, repr=False)
    connections: Annotated[int, Range(1, 2**20)] = 1000
    timeout: Annotated[float, Range(0.1, 86400)] = 120.0

    def check_combinations(self) -> None:
        """Rejects malformed addresses and empty ranges."""
        super().check_combinations()
        if not self.url.startswith(("http://", "https://")):
            raise GulliverError(f"url={self.url!r}: give an address such as http://127.0.0.1:8000")
        for name in ("prompt_words", "max_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise GulliverError(f"{name}={low} {high}: give the least and the most, from 1 on")

    @property
    def base(self) -> str:
        """Address with ``/v1``."""
        bare = self.url.rstrip("/")
        return bare if bare.endswith("/v1") else f"{bare}/v1"

    @property
    def key(self) -> str | None:
        """Key of the server: from the option, else the environment."""
        return self.api_key or os.environ.get(KEY_VARIABLE) or None
