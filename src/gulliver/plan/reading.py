"""Reads a plan's YAML into dataclasses and keeps the line of each value.

Every value is checked against its annotation and the range or choices of its field.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.io.files import named_errors
from gulliver.options import byte_size

LINES = "lines"
"""Field that holds the lines; not part of the file."""
END = "end"
"""Key of the last line of a file; without it the file is truncated."""


def read_text(path: Path) -> str:
    if not path.is_file():
        raise GulliverError(f"plan {path} does not exist")
    try:
        with named_errors(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GulliverError(f"{path} is not valid YAML: {error}") from error


def parse(text: str, where: str) -> tuple[Any, dict[str, int]]:
    """Returns the values of a YAML text, and the line of each value by its name."""
    import yaml

    try:
        values, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise GulliverError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    lines: dict[str, int] = {}
    for name, line in _marks(root, ""):
        if name in lines:
            raise GulliverError(
                f"{where} has {name} twice, on lines {lines[name]} and {line}; keep one of them"
            )
        lines[name] = line
    return values, lines


def _marks(node: Any, name: str) -> Iterator[tuple[str, int]]:
    if node is None:
        return
    if name:
        yield name, node.start_mark.line + 1
    if node.id == "mapping":
        for key, value in node.value:
            inner = join(name, str(key.value))
            # A nested mapping begins on the line of its key.
            yield inner, key.start_mark.line + 1
            yield from (mark for mark in _marks(value, inner) if mark[0] != inner)
    elif node.id == "sequence":
        for number, value in enumerate(node.value):
            yield from _marks(value, f"{name}[{number}]")


def join(name: str, key: str) -> str:
    """Returns the qualified name of an entry: ``mesh.axes.tensor``, ``modules['layers.0.mlp']``."""
    if not key.isidentifier():
        return f"{name}[{key!r}]"
    return f"{name}.{key}" if name else key


class Reader:
    """Builds dataclasses from plain values."""

    def __init__(self, where: str, lines: dict[str, int]) -> None:
        self.where, self.lines = where, lines

    def read(self, kind: Any, values: Any, name: str = "") -> Any:
        if not isinstance(values, dict):
            self._refuse(name, values, f"it must have the entries {', '.join(_fields(kind))}")
        known, hints = _fields(kind), typing.get_type_hints(kind)
        for key in values:
            if key not in known:
                place = self._place(join(name, str(key)))
                raise GulliverError(
                    f"{self.where} has an unknown key {key!r}{place}: {nearest(str(key), known)}"
                )
        for key, one in known.items():
            if key not in values and one.default is MISSING and one.default_factory is MISSING:
                raise GulliverError(f"{self.where} has no {join(name, key)}{self._place(name)}")
        found = {
            key: self._value(hints[key], value, join(name, key), known[key])
            for key, value in values.items()
        }
        return kind(**found)

    def _value(self, hint: Any, value: Any, name: str, one: Field[Any]) -> Any:
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            if value is None:
                return None
            hint = next(t for t in inner if t is not type(None))
            return self._value(hint, value, name, one)
        if is_dataclass(hint):
            return self.read(hint, value, name)
        if origin is tuple:
            if not isinstance(value, list):
                self._refuse(name, value, "it must be a list")
            values = enumerate(value)
            return tuple(self._value(inner[0], v, f"{name}[{n}]", one) for n, v in values)
        if origin is dict:
            if not isinstance(value, dict):
                self._refuse(name, value, "it must be a mapping with a value for each name")
            return {k: self._value(inner[1], v, join(name, str(k)), one) for k, v in value.items()}
        return self._plain(hint, value, name, one)

    def _plain(self, hint: Any, value: Any, name: str, one: Field[Any]) -> Any:
        if hint is float and type(value) is int:
            value = float(value)
        if one.metadata.get("size") and isinstance(value, str):
            try:
                value = byte_size(name, value)
            except GulliverError as error:
                self._refuse(name, value, str(error).partition(": ")[2])
        if type(value) is not hint:
            kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
            self._refuse(name, value, f"it must be {kinds[hint]}")
        known, least = one.metadata.get("known"), one.metadata.get("least")
        if known and value not in known:
            shown = ", ".join("null" if k is None else str(k) for k in known)
            self._refuse(name, value, f"it must be one of {shown}")
        if least is not None and value < least:
            self._refuse(name, value, f"it must be at least {least}")
        most = one.metadata.get("most")
        if most is not None and value > most:
            self._refuse(name, value, f"it must be at most {most}")
        if isinstance(value, float) and not math.isfinite(value):
            self._refuse(name, value, "it must be finite")
        return value

    def _refuse(self, name: str, value: Any, right: str) -> typing.NoReturn:
        if not name:
            raise GulliverError(f"{self.where} does not contain a plan: {right}")
        raise GulliverError(f"{self.where}: {name}: {value!r}{self._place(name)}: {right}")

    def _place(self, name: str) -> str:
        return f" (line {self.lines[name]})" if name in self.lines else ""


def _fields(kind: Any) -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(kind) if f.name != LINES}
