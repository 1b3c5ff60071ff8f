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
"""Environment variable with the API key, if no option sets it."""
BODY_BASE, BODY_TOKEN = 64 * 1024, 32
"""Bytes of a body without its prompt, and bytes per prompt token including escapes."""
PROBE_S = 15
"""Seconds without data after which TCP keep-alive probes a client."""
UNREAD_BYTES = 128 * 1024
"""Maximum unread bytes that the kernel buffers for a client."""


@dataclass(frozen=True)
class ServerOptions(Options):
    """Limits of a server; every limit is finite.

    Attributes:
        host: Address to listen on; 0.0.0.0 accepts connections from other machines.
        port: Port to listen on; 0 chooses a free port.
        name: Model name for clients; by default that of the folder.
        api_key: Key that clients must send; unlike the option, the variable GULLIVER_API_KEY is not
            visible in process lists.
        queue: Requests that may wait while others run; more get status 429.
        most_n: Maximum completions per prompt.
        max_tokens: Maximum tokens of a completion; by default limited only by the context.
        body_bytes: Maximum size of a request's body, such as 1MiB; by default 64 KiB plus 32 bytes
            per token.
        connections: Maximum open connections; requests on others get status 503.
        header_seconds: Time limit for receiving the head of a connection's first request.
        body_seconds: Time limit for receiving a request's body.
        idle_seconds: Seconds that a connection stays open between requests.
        stall_seconds: Seconds that a client may leave its response unread.
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
            raise GulliverError("the API key is empty or not ASCII: use letters and digits")

    @property
    def key(self) -> str | None:
        """API key from the option, otherwise from the environment."""
        return self.api_key or os.environ.get(KEY_VARIABLE) or None

    def body_limit(self, context: int) -> int:
        """Maximum body bytes, for sequences of up to `context` tokens."""
        if self.body_bytes is not None:
            return byte_size("body_bytes", self.body_bytes)
        return BODY_BASE + BODY_TOKEN * context

    def listen(self) -> socket.socket:
        """Binds the port; connections are not accepted yet.

        Raises:
            GulliverError: the port is in use, or the address does not belong to this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        # Connections of a server that has ended may keep the port for a minute.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these. A client whose machine is gone sends nothing, not even a FIN:
        # the kernel detects it by probes, or by data that is not acknowledged or read in time.
        # Without a limit, it would buffer megabytes for a client that does not read.
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
                f"{self.host}:{self.port} is not available ({error.strerror}): use another port, "
                "or 0 for a free one"
            ) from None
        return made


@dataclass(frozen=True)
class Load(Options):
    """A load for any server with the OpenAI API.

    Attributes:
        url: Address of the server, with or without /v1.
        model: Name of the model; by default the first that the server lists.
        requests: Number of requests.
        rate: Requests per second, as a Poisson process; by default all are sent immediately.
        prompt_words: Minimum and maximum words of a random prompt.
        max_tokens: Minimum and maximum tokens of a completion.
        prompts: Prompts to use in turn instead of random words.
        endpoint: API to call: completions or chats.
        temperature: Sampling temperature.
        ignore_eos: Request completions of full length; not all servers support it.
        seed: Seed of arrivals, lengths and words.
        api_key: API key of the server; by default GULLIVER_API_KEY.
        connections: Maximum requests in flight; later ones are delayed.
        timeout: Seconds without data after which a request has failed.
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
            raise GulliverError(f"url={self.url!r}: use an address such as http://127.0.0.1:8000")
        for name in ("prompt_words", "max_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise GulliverError(
                    f"{name}={low} {high}: use a minimum and a maximum of at least 1"
                )

    @property
    def base(self) -> str:
        """Address with ``/v1``."""
        bare = self.url.rstrip("/")
        return bare if bare.endswith("/v1") else f"{bare}/v1"

    @property
    def key(self) -> str | None:
        """API key of the server, from the option, otherwise from the environment."""
        return self.api_key or os.environ.get(KEY_VARIABLE) or None
