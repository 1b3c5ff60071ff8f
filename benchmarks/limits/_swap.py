"""A swap file for as long as it is needed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from benchmarks.limits._group import LimitsError


class Swap:
    """A swap file that the whole machine may use; leaving it brings back what lies there."""

    def __init__(self, folder: Path | str, nbytes: int) -> None:
        self.folder, self.nbytes = Path(folder), nbytes
        self._path: Path | None = None

    def __enter__(self) -> Swap:
        number, name = tempfile.mkstemp(prefix="gulliver-swap-", dir=self.folder)
        self._path = Path(name)
        try:
            os.fchmod(number, 0o600)
            os.posix_fallocate(number, 0, self.nbytes)
            os.close(number)
            for command in (["mkswap", name], ["swapon", name]):
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            told = getattr(error, "stderr", None) or error
            raise LimitsError(f"cannot swap to {name}: {str(told).strip()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends swapping to it, and removes it."""
        if self._path is not None:
            with suppress(OSError):
                subprocess.run(["swapoff", str(self._path)], capture_output=True)
            self._path.unlink(missing_ok=True)
            self._path = None
