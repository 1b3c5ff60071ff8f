"""Parser of JSON that refuses keys that are there twice, as Python's does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError


def parse_json(path: Path, content: bytes, kind: str = "JSON") -> Any:
    """Parses the content of a JSON file."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise GulliverError(f"{path} is truncated or no {kind} ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found
