"""What processes of `tests.video.test_cut` do with files; each of them imports this module."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gulliver.errors import GulliverError
from gulliver.video.preparation.work import FileOutcome


def odd_work(path: Path) -> FileOutcome:
    """Crashes, raises, or tells the process, as the name of the file says."""
    if path.name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if path.name == "full":
        raise GulliverError("no space left")
    return FileOutcome({"process": os.getpid(), "name": path.name})
