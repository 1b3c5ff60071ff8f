"""`ServerOptions`: where a server listens, who may ask, and how much of everything.

No torch and no FastAPI here.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Annotated

from gulliver.errors import GulliverError
from gulliver.options import Options, Range

KEY_VARIABLE = "GULLIVER_API_KEY"
"""Environment variable with the key, where no option gives it."""
BODY_BASE, BODY_TOKEN = 64 * 1024, 32
"""Bytes of a body beside its prompt, and of a token of it: some characters, escaped."""
BODIES = 64
"""Bodies of the largest size that may be in memory at a time, in bytes."""


@dataclass(frozen=True)
class ServerOptions(Options):
    """Limits of a server, all finite.

    Attributes:
        host: address to listen at.
        port: port; 0 takes one that is free.
        name: name of the model in requests and answers; None for the folder's.
        api_key: key that clients must send; None asks for none.
        queue: answers that may wait beside those that run; more are refused with 429.
        most_n: most answers to a prompt.
        max_tokens: most tokens of an answer; None for what the context leaves.
        body_bytes: largest body of a request; None chooses by the context.
        connections: open connections; more are refused with 503 and closed.
        header_seconds: seconds for the head of a request to come.
        body_seconds: seconds for its body.
        idle_seconds: seconds that a connection stays open between requests.
        stall_seconds: seconds that a client may leave what is sent to it unread.
        drain_seconds: seconds that running requests get at the end.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    queue: Annotated[int, Range(0, 2**20)] = 256
    most_n: Annotated[int, Range(1, 128)] = 16
    max_tokens: Annotated[int | None, Range(1)] = None
    body_bytes: Annotated[int | None, Range(1024)] = None
    connections: Annotated[int, Range(1, 2**20)] = 1000
    header_seconds: Annotated[float, Range(0.1, 3600)] = 10.0
    body_seconds: Annotated[float, Range(0.1, 3600)] = 30.0
    idle_seconds: Annotated[float, Range(0.1, 86400)] = 60.0
    stall_seconds: Annotated[float, Range(0.1, 3600)] = 30.0
    drain_seconds: Annotated[float, Range(0, 86400)] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise GulliverError("the API key is empty or not ASCII: give letters and digits")

    @property
    def key(self) -> str | None:
        """Key that clients must send: the option's, else the environment's."""
        return self.api_key or os.environ.get(KEY_VARIABLE) or None

    def body_limit(self, context: int) -> int:
        """Largest body, in bytes.

        Args:
            context: most tokens of a sequence.
        """
        return self.body_bytes or BODY_BASE + BODY_TOKEN * context

    def listen(self) -> socket.socket:
        """Takes the port; nobody is let in yet.

        Raises:
            GulliverError: it is taken, or the address is not one of this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        # Connections of a server that has ended may keep the port for a minute.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((self.host, self.port))
        except OSError as error:
            made.close()
            raise GulliverError(
                f"{self.host}:{self.port} cannot be listened at ({error.strerror}): name another "
                "port, 0 for any that is free"
            ) from None
        return made
