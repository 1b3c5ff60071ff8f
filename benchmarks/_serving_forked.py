"""`gulliver serve` whose ranks are forked from a process that has imported what they need.

    python -m benchmarks._serving_forked serve --model FOLDER --pipeline 2

Ranks are Pythons of their own otherwise, which import torch for seconds; with many kills that would
be all that is waited for. Between being started and being lost a rank does here what it always
does: `serve_rank` with its order.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import subprocess
import sys
from typing import Any

from gulliver.serve.ranks import controller as _processes

CONTEXT: Any = multiprocessing.get_context("forkserver")
NEEDED = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "gulliver.serve.ranks.worker",
    "gulliver.serve.ranks.controller",
)


class _Entry(io.BytesIO):
    """Standard input of a rank, which begins when all has been said."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self._start = start

    def close(self) -> None:
        if not self.closed:
            self._start(self.getvalue())
        super().close()


class Forked:
    """Stands for `subprocess.Popen` of a rank."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, *_: object, **__: object) -> None:
        self._process: Any = None
        self.stdin = _Entry(self._begin)

    def _begin(self, said: bytes) -> None:
        self._process = CONTEXT.Process(target=be_rank, args=(said,), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()


def be_rank(said: bytes) -> None:
    """Is a rank: reads the order as `gulliver.serve.ranks.__main__` does."""
    entry = io.BytesIO(said)
    pickle.load(entry)
    _processes.serve_rank(pickle.load(entry))


def main() -> None:
    """Runs the command."""
    from gulliver.cli.dispatch import main as command

    CONTEXT.set_forkserver_preload(list(NEEDED))
    _processes.subprocess = Forked  # pyright: ignore[reportAttributeAccessIssue]
    Forked.Popen = Forked  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(command())


if __name__ == "__main__":
    main()
