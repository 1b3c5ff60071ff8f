"""Checks whether saved values fit the dtype of what they are loaded into.

Floating-point numbers may be rounded, as everywhere; a finite one must not become infinite or no
number. Everything else has to be the same number afterwards.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gulliver.errors import GulliverError

QUICK = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose extremes torch finds."""


def always_fits(saved: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of one dtype fits another, so that none has to be looked at."""
    if saved == target:
        return True
    kinds = _kind(saved), _kind(target)
    if kinds == ("integer", "integer"):
        low, high = _range(saved)
        return low >= _range(target)[0] and high <= _range(target)[1]
    if kinds[0] == "integer":
        return saved == torch.bool
    if kinds[1] == "integer" or kinds == ("complex", "float"):
        return False
    return torch.finfo(saved).max <= torch.finfo(target).max


def misfit(values: Tensor, target: torch.dtype) -> str | None:
    """Names the first value that does not fit, for a message; None if all fit."""
    values = values.reshape(-1)
    if always_fits(values.dtype, target) or not values.numel():
        return None
    if values.dtype in QUICK and _kind(target) == "float":
        # One pass that makes no copy. Infinities and what is no number take the longer way.
        ends = torch.stack(torch.aminmax(values))
        if bool(ends.isfinite().all()) and not bool(_not_finite(ends, target).any()):
            return None
    if _kind(target) == "integer":
        bad = _not_integers(values, target)
    elif _kind(values.dtype) == "integer":
        bad = _not_exact(values, target)
    else:
        bad = _not_finite(values, target)
    if not bool(bad.any()):
        return None
    value = values[int(bad.nonzero()[0])]
    return f"{value.item()} does not fit {str(target).removeprefix('torch.')}"


def fitted(where: str, name: str, values: Tensor, target: torch.dtype) -> Tensor:
    """Converts values of a tensor; see `refuse_misfit`."""
    refuse_misfit(where, name, values, target)
    return values.to(target)


def refuse_misfit(where: str, name: str, values: Tensor, target: torch.dtype) -> None:
    """Refuses values of a tensor that do not fit the dtype that they are to be converted to."""
    problem = misfit(values, target)
    if problem is not None:
        raise GulliverError(
            f"{where}: tensor {name!r} is {str(values.dtype).removeprefix('torch.')} there: "
            f"{problem}"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "integer"


def _range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _not_integers(values: Tensor, target: torch.dtype) -> Tensor:
    low, high = _range(target)
    if _kind(values.dtype) == "integer":
        # torch does not compare all unsigned integers.
        numbers = values.numpy()
        return torch.from_numpy((numbers < low) | (numbers > high))
    if values.is_complex():
        return (values.imag != 0) | _not_integers(values.real, target)
    exact = values.double()
    # The highest integer need not be a floating-point number; the one after it is.
    return ~((exact == exact.trunc()) & (exact >= float(low)) & (exact < float(high + 1)))


def _not_exact(values: Tensor, target: torch.dtype) -> Tensor:
    numbers, found = values.numpy(), values.to(target)
    again = (found.real if found.is_complex() else found).double().numpy()
    bad = numbers.astype(np.float64) != again
    # Doubles do not tell large integers apart: the few that there are one by one.
    for place in np.flatnonzero(np.isfinite(again) & (np.abs(again) >= 2.0**53)):
        bad[place] = int(again[place]) != int(numbers[place])
    return torch.from_numpy(bad)


def _not_finite(values: Tensor, target: torch.dtype) -> Tensor:
    if values.is_complex():
        if _kind(target) == "float":
            return (values.imag != 0) | _not_finite(values.real, target)
        parts = torch.view_as_real(values)
        return _not_finite(parts, target.to_real()).any(-1)
    target = target.to_real()
    # Floats of 8 bits cannot be asked themselves, and some become the largest instead of infinite.
    info, was = torch.finfo(target), values.double()
    most = info.max * (1 + info.eps / 2)
    return was.isfinite() & (~values.to(target).double().isfinite() | (was.abs() > most))
