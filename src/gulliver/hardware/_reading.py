"""Builds frozen dataclasses from the plain values of a file, as their annotations say.

Unknown and missing entries and values of the wrong kind are refused in one line that says where.
Numbers are finite and, but for those in `ZERO_ALLOWED`, above zero: rates, sizes and counts are.
It knows nothing of what the dataclasses mean.
"""

from __future__ import annotations

import datetime
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from gulliver.errors import GulliverError, nearest

ZERO_ALLOWED = {"alpha_s", "launch_s", "latency_s", "error", "spread", "rank_order", "overlap"}


def read(kind: Any, values: Any, where: str) -> Any:
    """A dataclass of some kind."""
    if not isinstance(values, dict):
        raise GulliverError(f"{where} holds no {kind.__name__.lower()}")
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise GulliverError(f"{where} has an unknown entry {key!r}: {nearest(str(key), known)}")
    for name, entry in known.items():
        if name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise GulliverError(f"{where} has no entry {name!r}")
    hints = typing.get_type_hints(kind)
    found = {k: _value(hints[k], v, f"{where}: {k}", k) for k, v in values.items()}
    try:
        return kind(**found)
    except GulliverError as error:
        raise GulliverError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    """One value of an annotated type; `name` is that of the field it belongs to."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _value(next(t for t in inner if t is not type(None)), value, where, name)
    if is_dataclass(hint):
        return read(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list | types.NoneType):
            raise GulliverError(f"{where} is {value!r}: it must be a list")
        return tuple(_value(inner[0], v, f"{where} {n}", name) for n, v in enumerate(value or ()))
    if origin is dict:
        if not isinstance(value, dict):
            raise GulliverError(f"{where} is {value!r}: it must give a value to each name")
        return {str(k): _value(inner[1], v, f"{where} {k}", name) for k, v in value.items()}
    if hint in (int, float):
        return _number(hint, value, where, name in ZERO_ALLOWED)
    if hint is str and isinstance(value, int | float | datetime.date):
        # A date or a version without quotes.
        return str(value)
    if not isinstance(value, hint):
        kind = "true or false" if hint is bool else "text"
        raise GulliverError(f"{where} is {value!r}: it must be {kind}")
    return value


def _number(hint: type, value: Any, where: str, zero: bool) -> Any:
    if isinstance(value, str):
        # YAML reads 1e9 as a word: it asks for a point.
        try:
            value = float(value)
        except ValueError:
            raise GulliverError(f"{where} is {value!r}: it must be a number") from None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        kind = "a number that is not negative" if zero else "a positive number"
        raise GulliverError(f"{where} is {value!r}: it must be {kind}")
    if hint is int and value != int(value):
        raise GulliverError(f"{where} is {value!r}: it must be a whole number")
    return hint(value)
