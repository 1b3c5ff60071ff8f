"""Log of a job, and derivation of its seeds."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.io.files import named_errors, write_text


def derive(*parts: int) -> int:
    """Derives a 63-bit seed from numbers; different numbers give independent seeds."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


# The log of a job: a line of JSON for each logged step, cut where a job resumes.


@dataclass(frozen=True)
class Log:
    """Log file with one JSON object per line, each with its ``step``."""

    path: Path

    def read(self) -> list[dict[str, Any]]:
        # Invalid lines are skipped: the last line of a killed run may be incomplete.
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in map(_parsed, lines) if line is not None]

    def cut(self, step: int) -> None:
        """Drops lines after `step`, which a resumed run writes again."""
        if self.path.is_file():
            lines = [line for line in self.read() if line["step"] <= step]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def append(self, line: dict[str, Any]) -> None:
        with named_errors(self.path):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with os.fdopen(os.open(self.path, flags, 0o666), "w") as file:
                file.write(json.dumps(line) + "\n")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None
