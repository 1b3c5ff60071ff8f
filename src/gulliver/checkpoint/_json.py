"""Parser of JSON that refuses keys that are there twice, as Python's does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError


def parse_json(path: Path, content: bytes, kind: str = "JSON") -> Any:
    """Parses the content of a JSON file.

    Args:
        path: path of the file, for messages.
        content: bytes of the file.
        kind: kind of file that it should be, for messages.

    Raises:
        GulliverError: it is no JSON, or an object of it has a key twice.
    """
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
