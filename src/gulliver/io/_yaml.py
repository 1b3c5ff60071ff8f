"""Writing YAML without a library: dicts, lists and plain values, in block style.

A list of numbers stands on one line.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that YAML 1.1 takes for something other than text."""


def to_yaml(value: dict[str, Any]) -> str:
    """Writes a dict as YAML text that PyYAML reads back as equal; tuples come back as lists."""
    return "\n".join(_block(value, 0)) + "\n" if value else "{}\n"


def _block(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    lines: list[str] = []
    entries = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in entries:
        head = f"{pad}-" if key is None else f"{pad}{_key(key)}:"
        if _row(item):
            lines.append(f"{head} [{', '.join(_scalar(part) for part in item)}]")
        elif isinstance(item, dict | list | tuple) and item:
            lines += [head, *_block(item, depth + 1)]
        else:
            lines.append(f"{head} {_scalar(item)}")
    return lines


def _row(value: Any) -> bool:
    """Whether a value is a list of numbers, which reads best on one line."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(part, int | float) for part in value)
    )


def _key(key: str) -> str:
    return key if PLAIN.fullmatch(key) and key.lower() not in WORDS else _scalar(key)


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        # Escapes of 16 bits cannot say all characters in YAML; what is printable stands for itself.
        return "".join(_escaped(c) for c in json.dumps(value, ensure_ascii=False))
    return json.dumps(value)


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 reads 1e-05 as text: the point is needed.
    return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text
