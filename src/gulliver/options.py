"""Validation of user options: numbers, sizes, ranges, and options in files.

A field of an `Options` dataclass declares its type, its choices (``Literal["a", "b"]``) and its
range (``Annotated[int, AT_LEAST_1]``); `checked` applies them to values from any source: the
dataclass when constructed in Python, `check_options` for a command line, `from_plain` for a file.
Sizes in bytes may be text, such as ``6GiB``, ``500 MB`` or ``70%``; `byte_size` parses them.
`resolved` converts options to plain JSON for a file, `from_plain` converts them back, and
`differences` lists what changed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from gulliver.errors import GulliverError, nearest

if not typing.TYPE_CHECKING:

    class _RenamingType(type):
        def __call__(cls, *args: Any, **fields: Any) -> Any:
            if fields.keys() - field_hints(cls).keys():
                fields = with_new_names(cls, fields)
            return super().__call__(*args, **fields)

else:
    _RenamingType = type

_Kind = TypeVar("_Kind")

MOST = 2**31 - 1
"""Upper bound of integers without a declared one."""


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; both bounds are included unless marked open."""

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
            return "positive" + (
                "" if self.most in (MOST, math.inf) else f", at most {self.most:g}"
            )
        if self.most == MOST:
            return f"at least {self.least:g}"
        if self.open_above:
            return f"at least {self.least:g} and less than {self.most:g}"
        return f"between {self.least:g} and {self.most:g}"


@dataclass(frozen=True)
class Size:
    """Text with a size of at least 1 MiB, such as ``6GiB``; or a share, such as ``70%``."""

    share: bool = False

    def check(self, name: str, value: Any) -> None:
        # A number without a unit counts bytes, but is hardly ever meant so.
        if byte_size(name, value, LARGEST if self.share else None) < UNITS["MiB"]:
            raise GulliverError(f"{name} is {value!r}, less than 1 MiB: {RIGHT}")


POSITIVE = Range(0, open_below=True)
AT_LEAST_0 = Range(0)
AT_LEAST_1 = Range(1)
SHARE = Range(0, 1)
RATE = Range(0, 10, open_below=True)
RANKS = Range(0, 1024)
SEED = Range(-(2**63), 2**63 - 1)
GUIDANCE = Range(-1000, 1000)
Tracker = Literal["tensorboard", "wandb", "mlflow"]


def whole_number(name: str, value: Any) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise GulliverError(f"{name} must be a whole number, not {value!r}")
    return number


UNITS = {
    **{"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
_UNITS = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(r"(-?[0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z%]*)")
LARGEST = 2**60
RIGHT = "use a number with a unit, such as '6GiB' or '500 MB'"


def byte_size(name: str, value: Any, whole: int | None = None) -> int:
    """Converts a size, such as ``6GiB``, or ``70%`` of `whole`, to bytes."""
    right = RIGHT
    if isinstance(value, str):
        size, right = _text_size(name, value, whole)
    elif isinstance(value, float):
        size = int(value) if math.isfinite(value) else 0
    else:
        size = whole_number(name, value)
    if size < 1:
        raise GulliverError(f"{name}={value!r} is not a positive size: {right}")
    if size > LARGEST:
        raise GulliverError(f"{name}={value!r} is more than any machine has: {right}")
    return size


def _text_size(name: str, text: str, whole: int | None) -> tuple[int, str]:
    right = RIGHT if whole is None else f"{RIGHT}, or a share, such as '70%'"
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise GulliverError(f"{name}={text!r} is not a size: {right}")
    digits, unit = found.groups()
    number = Fraction(re.sub("[_,]", "", digits))
    if unit == "%":
        if whole is None:
            raise GulliverError(
                f"{name}={text!r} is a percentage, but the total is unknown: {RIGHT}"
            )
        if number > 100:
            raise GulliverError(f"{name}={text!r} is more than 100%: {right}")
        return int(number * whole / 100), right
    if unit and unit.lower() not in _UNITS:
        raise GulliverError(f"{name}={text!r} has no known unit: {nearest(unit, UNITS)}")
    return int(number * _UNITS[unit.lower() or "b"]), right


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def size_at_least(count: int) -> str:
    """Formats a number of bytes, rounded up, in a form that `byte_size` parses."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{math.ceil(count * 100 / UNITS[unit]) / 100:.2f}{unit}"
    return f"{count}B"


def positive_number(name: str, value: Any) -> float:
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise GulliverError(f"{name} must be a number, not {value!r}")
    if not float(value) > 0:
        raise GulliverError(f"{name} must be positive, not {value}")
    return float(value)


_CHECKING: ContextVar[bool] = ContextVar("checking", default=True)


class Options(metaclass=_RenamingType):
    """Base class of option dataclasses, checked against their annotations when constructed.

    Values are converted as in a file: integers to floats, text to paths, lists to tuples.

    Raises:
        GulliverError: names the field, its value and the valid values.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {}
    """Headings in the help text, by the first field of each group."""

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in (renamed := renamed_fields(type(self))):
                return getattr(self, renamed[name])
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __post_init__(self) -> None:
        if _CHECKING.get():
            check_options(self, f"{type(self).__name__}.")
            self.check_combinations()

    def check_combinations(self) -> None:
        """Rejects invalid combinations of values; subclasses extend it."""


RENAMED: dict[str, tuple[str, ...]] = {
    **{"tp": ("tp_size",), "tensor": ("tp_size",), "sp": ("sp_size",), "sequence": ("sp_size",)},
    **{"pp": ("pp_size",), "pipeline": ("pp_size",), "batch": ("batch_size",)},
    **{"length": ("seq_length",), "seq": ("seq_length",), "context": ("seq_length",)},
    **{"precision": ("dtype",), "mixed_precision": ("dtype",)},
    **{"memory": ("memory_limit",), "host": ("host_memory",), "cache_bytes": ("kv_cache",)},
    **{"cache": ("kv_cache", "step_cache", "cached_share")},
    **{
        "prompts": ("prompt_file", "prompt"),
        "prompt": ("prompt_length",),
        "max_body": ("body_bytes",),
    },
}
"""Option names from before 0.2 and the current ones. Old names are accepted on the command line, in
files, as constructor arguments and as attributes."""
IN_GIBIBYTES = ("PlanData", "PlannerConfig")
"""Options classes whose ``memory`` used to be a number of GiB."""


def renamed_fields(kind: type, hidden: Collection[str] = ()) -> dict[str, str]:
    """Maps old field names to current ones; skips names of fields not in `hidden`."""
    known = field_hints(kind).keys()
    taken = known - set(hidden)
    new = {
        old: next((name for name in names if name in known), "") for old, names in RENAMED.items()
    }
    return {old: name for old, name in new.items() if name and old not in taken}


def with_new_names(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces deprecated option names with the current ones, recursively."""
    renamed, known, made = renamed_fields(kind), field_hints(kind), {}
    # Values by old names come last, because `dataclasses.replace` adds the new one's current value.
    for name, value in sorted(values.items(), key=lambda pair: pair[0] in renamed):
        new = renamed.get(name, name)
        inner = bare(known.get(new, Any))
        if isinstance(value, dict) and dataclasses.is_dataclass(inner):
            value = with_new_names(typing.cast(type, inner), value)
        made[new] = renamed_value(kind, name, value)
    return made


def renamed_value(kind: type, old: str, value: Any) -> Any:
    """Converts the value of a renamed option, such as a number of GiB to a size."""
    if old != "memory" or kind.__name__ not in IN_GIBIBYTES or value is None:
        return value
    try:
        return f"{float(value):g}GiB"
    except ValueError:
        return value


DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Torch dtype names by short name."""
_SHORT = {name: short for short, name in DTYPES.items()} | {"none": "fp32"}


def alternative_dtype(value: Any, choices: Collection[Any]) -> Any:
    """Returns the other spelling of a dtype (bf16, bfloat16) if only that one is a choice."""
    if not isinstance(value, str) or value in choices:
        return value
    other = _SHORT.get(value, DTYPES.get(value))
    return other if other in choices else value


Chosen = TypeVar("Chosen", bound=Options)


def part_of(options: Any, kind: type[Chosen]) -> Chosen:
    """Creates a `kind` dataclass from the same fields of another options dataclass."""
    return kind(**{name: getattr(options, name) for name in field_hints(kind)})


@contextmanager
def unchecked() -> Iterator[None]:
    """Creates options without validation; call `check_options` later."""
    token = _CHECKING.set(False)
    try:
        yield
    finally:
        _CHECKING.reset(token)


@functools.cache
def field_hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def check_options(options: Any, prefix: str = "--") -> None:
    """Validates all values against their annotations, including nested options."""
    for field, hint in field_hints(type(options)).items():
        value = getattr(options, field)
        name = prefix + (field.replace("_", "-") if prefix.startswith("--") else field)
        right = checked(value, hint, name)
        if right is not value:
            object.__setattr__(options, field, right)
        if isinstance(right, Options):
            check_options(right, prefix if hasattr(right, "UNPREFIXED") else f"{name}.")


def check_needs(options: Any, needs: Mapping[str, tuple[bool, str]]) -> None:
    """Rejects options that would have no effect, unless they have their default values."""
    default = type(options)()
    for path, (met, right) in needs.items():
        value = operator.attrgetter(path)(options)
        if not met and value != operator.attrgetter(path)(default):
            raise GulliverError(f"{_as_given(path, value)}: {right}")


def _as_given(path: str, value: Any) -> str:
    group, dot, name = path.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{group}{dot}{'' if value else 'no-'}{name}"
    return f"--{group}{dot}{name} is {value}"


def resolved(config: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))


def from_plain(values: dict[str, Any], kind: type, prefix: str = "") -> Any:
    return kind(**plain_fields(values, kind, prefix))


def plain_fields(values: Any, kind: type, prefix: str = "") -> dict[str, Any]:
    """Returns an options dataclass's fields from plain values, under old or new names."""
    if not isinstance(values, dict):
        raise GulliverError(f"config key {prefix.rstrip('.')!r} must hold a table of values")
    hints, values = field_hints(kind), with_new_names(kind, values)
    for key in values:
        if key not in hints:
            raise GulliverError(f"unknown config key {prefix + key!r}: {nearest(key, hints)}")
    built = {}
    for key, value in values.items():
        inner = bare(hints[key])
        if dataclasses.is_dataclass(inner):
            built[key] = from_plain(value, typing.cast(type, inner), f"{prefix}{key}.")
        else:
            built[key] = checked(value, hints[key], f"config key {prefix + key!r}")
    return built


def bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def checked(value: Any, hint: Any, name: str) -> Any:
    """Validates `value` against an annotation and returns it converted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = checked(value, arguments[0], name)
        for extra in arguments[1:]:
            # An option may be something else instead, such as a file.
            if isinstance(extra, Range) and isinstance(value, int | float) and value not in extra:
                raise GulliverError(f"{name} is {value}, but must be {extra}")
            if isinstance(extra, Size) and value is not None:
                extra.check(name, value)
        return value
    if origin is Literal:
        value = alternative_dtype(value, arguments)
        # True == 1, but True is not a stage.
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            choices = ", ".join(repr(choice) for choice in arguments)
            raise GulliverError(f"{name} is {value!r}: choose from {choices}")
        return value
    if origin in (types.UnionType, typing.Union):
        return _checked_as_any(value, arguments, name)
    if origin is tuple and isinstance(value, list | tuple):
        return _checked_items(value, arguments, name)
    found = _converted(value, hint)
    is_bool = isinstance(found, bool)
    if hint is Any or (isinstance(found, origin or hint) and (not is_bool or hint is bool)):
        return found
    kind = getattr(hint, "__name__", str(hint))
    raise GulliverError(f"{name} is {value!r}, but must be of type {kind}")


def _converted(value: Any, hint: Any) -> Any:
    """Converts numbers and paths to the annotated type; returns other values unchanged."""
    if isinstance(value, bool):
        return value
    if hint is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if hint is int and isinstance(value, numbers.Integral):
        return int(value)
    if hint is float and isinstance(value, numbers.Real):
        return float(value)
    return value


def _checked_items(value: Any, hints: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Validates a tuple's items: any number of one type, or one of each type."""
    if hints[-1] is ...:
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        raise GulliverError(f"{name} is {value!r}, but must have {len(hints)} values")
    return tuple(checked(item, hint, name) for item, hint in zip(value, hints, strict=True))


def _checked_as_any(value: Any, hints: tuple[Any, ...], name: str) -> Any:
    """Converts `value` to the first type of a union that it matches."""
    if value is None and type(None) in hints:
        return None
    problem: GulliverError | None = None
    for hint in (hint for hint in hints if hint is not type(None)):
        try:
            return checked(value, hint, name)
        except GulliverError as error:
            # Text that is not among the choices is more likely misspelled than of the wrong type.
            misspelt = isinstance(value, str) and typing.get_origin(hint) is Literal
            problem = error if misspelt else problem or error
    assert problem is not None, "a union has types besides None"
    choices = [
        repr(c) for h in hints if typing.get_origin(h) is Literal for c in typing.get_args(h)
    ]
    missing = [choice for choice in choices if choice not in str(problem)]
    if missing:
        raise GulliverError(f"{problem}, or one of {', '.join(missing)}")
    raise problem


def differences(
    old: dict[str, Any], new: dict[str, Any], may_change: Collection[str] = (), prefix: str = ""
) -> list[str]:
    """Lists the keys that differ between two resolved configurations."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        name = prefix + key
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, may_change, name + ".")
        elif alternative_dtype(before, (after,)) != after and name not in may_change:
            found.append(f"{name} was {before!r}, is {after!r}")
    return found


def from_keywords(kind: type[_Kind], given: Mapping[str, Any], owner: Callable[..., Any]) -> _Kind:
    """Creates an options dataclass from constructor keywords; rejects unknown names."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    given = with_new_names(kind, given)
    for name in given:
        if name not in known:
            parameters = inspect.signature(owner).parameters.values()
            own = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            raise GulliverError(
                f"{owner.__name__} has no argument {name!r}: {nearest(name, [*own, *known])}"
            )
    return kind(**given)
