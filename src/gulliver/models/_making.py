"""Builds a model of the fields that a configuration or a caller gives, and says which are wrong.

Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any, TypeVar

from gulliver.errors import GulliverError, nearest

T = TypeVar("T")
MAY_BE_ZERO = ("depth_single_blocks", "temporal_downsamples")
"""Counts that may be 0."""


def make_of_fields(kind: type[T], fields: Mapping[str, Any], where: object = None) -> T:
    """Builds a model, and refuses fields that it cannot be built of."""
    parameters = inspect.signature(kind).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    try:
        for name, value in fields.items():
            if name in parameters:
                _check(f"{name} of {kind.__name__}", name, str(parameters[name].annotation), value)
            elif not open_ended:
                right = nearest(name, parameters)
                raise GulliverError(f"{kind.__name__} has no field {name!r}: {right}")
        return kind(**fields)
    except GulliverError as error:
        if where is None:
            raise
        raise GulliverError(f"{where}: {error}") from None
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        line = str(error).strip().split("\n")[0]
        told = "" if where is None else f"{where}: "
        raise GulliverError(f"{told}no {kind.__name__} has these fields: {line}") from error


def _check(told: str, name: str, annotation: str, value: Any) -> None:
    """Refuses a number that is none, or out of its range, by the annotation of its argument."""
    if value is None and "None" in annotation.rsplit("|", 1)[-1]:
        return
    sizes = annotation.startswith(("Sequence[int", "tuple[int"))
    numbers: list[Any] = [value]
    if sizes:
        if not isinstance(value, list | tuple):
            raise GulliverError(f"{told} is {value!r}: expected a list of whole numbers")
        numbers = list(value)
    if sizes or annotation.startswith("int"):
        least = -1 if name == "kernel_size" else int(name not in MAY_BE_ZERO)
        fits = partial(_is_size, least=least, optional="None" in annotation)
        if not all(map(fits, numbers)):
            raise GulliverError(f"{told} is {value!r}: expected whole numbers of at least {least}")
    elif annotation.startswith("float"):
        _check_real(told, name, value)


def _check_real(told: str, name: str, value: Any) -> None:
    if not _is(value, Real) or not math.isfinite(value):
        raise GulliverError(f"{told} is {value!r}: expected a number")
    if name.endswith("_prob") and not 0 <= value <= 1:
        raise GulliverError(f"{told} is {value!r}: expected a probability, from 0 to 1")
    if name.endswith("_ratio") and value <= 0:
        raise GulliverError(f"{told} is {value!r}: expected a number above 0")


def _is_size(value: Any, least: int, optional: bool) -> bool:
    if value is None:
        return optional
    return _is(value, Integral) and value >= least


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
