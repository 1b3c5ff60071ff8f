"""Options of the server; imports neither torch nor FastAPI."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Annotated

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_1, Options, Range, byte_size

KEY_VARIABLE = "GULLIVER_API_KEY"
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
