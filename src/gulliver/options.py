"""Numbers that users give, and the ranges that they must lie in.

An option says its range beside its type, ``steps: Annotated[int, AT_LEAST_1]``, and `check_options`
looks at all of them, whoever has filled them in: a command line, a file, or a program.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import typing
from dataclasses import dataclass
from typing import Any

from gulliver.errors import GulliverError

MOST = 2**31 - 1
"""Upper bound of whole numbers that have no other."""


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; both are among them, unless one is said to be open."""

    least: float
    most: float = MOST
    open_below: bool = False
    open_above: bool = False

    def __contains__(self, value: float) -> bool:
        if math.isnan(value):
            return False
        above = value > self.least if self.open_below else value >= self.least
        return above and (value < self.most if self.open_above else value <= self.most)

    def __str__(self) -> str:
        if (self.least, self.open_below) == (0, True):
            return "positive" + ("" if self.most == MOST else f", at most {self.most:g}")
        if self.most == MOST:
            return f"at least {self.least:g}"
        if self.open_above:
            return f"at least {self.least:g} and less than {self.most:g}"
        return f"between {self.least:g} and {self.most:g}"


POSITIVE = Range(0, open_below=True)
AT_LEAST_0 = Range(0)
AT_LEAST_1 = Range(1)
SHARE = Range(0, 1)
RATE = Range(0, 10, open_below=True)
"""Range of learning rates."""
RANKS = Range(0, 1024)
"""Range of numbers of processes on one machine."""
SEED = Range(-(2**63), 2**63 - 1)
GUIDANCE = Range(-1000, 1000)


def whole_number(name: str, value: Any) -> int:
    """Converts a whole number of Python, numpy or torch to an int.

    Raises:
        GulliverError: it is no whole number; a bool counts as none.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise GulliverError(f"{name} must be a whole number, not {value!r}")
    return number


def positive_number(name: str, value: Any) -> float:
    """Converts a number above 0 to a float.

    Raises:
        GulliverError: it is no number, or not above 0.
    """
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise GulliverError(f"{name} must be a number, not {value!r}")
    if not float(value) > 0:
        raise GulliverError(f"{name} must be positive, not {value}")
    return float(value)


def ranges_of(kind: type) -> dict[str, Range]:
    """Finds the range of each option of a dataclass that has one."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Range):
                found[name] = extra
    return found


def check_options(options: Any, prefix: str = "--") -> None:
    """Refuses numbers that lie outside of their range, in options and in those inside them.

    Args:
        options: dataclass instance, whose fields may be dataclasses too.
        prefix: prefix of the options' names, for the message.

    Raises:
        GulliverError: naming the option, its value and what would be right.
    """
    ranges = ranges_of(type(options))
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            check_options(value, f"{name}.")
        elif field.name in ranges and value is not None and value not in ranges[field.name]:
            raise GulliverError(f"{name} is {value}: it must be {ranges[field.name]}")
