"""Finding the command, and how errors look: one line and a non-zero exit."""

from __future__ import annotations

import os
import sys

from gulliver.errors import GulliverError


def main(arguments: list[str] | None = None) -> None:
    """Runs a command of `gulliver` and exits with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from gulliver.cli._commands import run

        code = run(arguments)
    except GulliverError as error:
        rank = os.environ.get("RANK", "0")
        prefix = "" if rank == "0" else f"rank {rank}: "
        print(f"gulliver: {prefix}{error}", file=sys.stderr, flush=True)
        code = 1
    except KeyboardInterrupt:
        code = 130
    _leave(code)


def _leave(code: int) -> None:
    """Exits; a rank leaves its world first, or the others would wait for it."""
    if code == 0 and "RANK" in os.environ:
        from gulliver.comm import shutdown

        shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code and "RANK" in os.environ:
        # Threads of a broken process group may never end by themselves.
        os._exit(code)
    sys.exit(code)
