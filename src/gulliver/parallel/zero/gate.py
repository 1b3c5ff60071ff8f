"""Compares compressed gradients with exact ones; raises if compression harms training."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gulliver.comm.collectives import (
    Group,
    all_reduce,
    any_rank,
)
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.precision.wire.formats import BLOCKS, IDENTITY, WireFormat

_LOG = logging.getLogger("gulliver")
FIRST_CHECKS, CHECK_EVERY = 3, 100
"""Steps whose gradients are compared: the first few, then one in every `CHECK_EVERY`."""
COSINE, COSINE_WITH_FEEDBACK = 0.995, 0.9
"""Minimum cosine between gradients; lower with error feedback, which corrects errors later."""
NORM = 0.1
"""Maximum relative difference between norms."""
MATTERS = 1e-3
"""Minimum share of the total error for a parameter to be checked."""


# [Note: the gate] A harmful format is not obvious: the loss still falls, but more slowly. So in the
# first steps, and in every hundredth step afterwards, gradients are also reduced unpacked and
# compared for every parameter, by cosine and ratio of norms. A parameter beyond the limits ends the
# run on all ranks with an error that names it. Parameters with a negligible share of the total
# error are skipped: for instance, the bias of an attention's keys has only rounding errors as its
# gradient.
@dataclass(frozen=True)
class ZeroWires:
    """Wire formats of chunks."""

    reduce: WireFormat = IDENTITY
    gather: WireFormat = IDENTITY
    # Whether packing errors of a gradient are added to the next one.
    feedback: bool = False
    # Whether gradients are regularly compared with unpacked ones.
    gate: bool = True

    def of_parameters(self, parts: int, part_size: int, dtype: torch.dtype) -> WireFormat:
        none = torch.empty(0, dtype=dtype)
        return IDENTITY if parts == 1 else self.gather.of(none, part_size)


class GradientGate:
    """Compares compressed gradients with exact ones; see the note above."""

    def __init__(self, wire: WireFormat, feedback: bool, on: bool) -> None:
        self.wire, self.feedback, self.on = wire, feedback, on
        # Smallest cosine and largest relative difference of norms in the last check, with the names
        # of their parameters; empty before the first check.
        self.compared: dict[str, tuple[str, float]] = {}
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self._told = False

    @property
    def checking(self) -> bool:
        return self.on and (self._steps < FIRST_CHECKS or self._steps % CHECK_EVERY == 0)

    def add(self, name: str, found: Tensor, exact: Tensor) -> None:
        """Adds a gradient, or a part of one, in compressed and exact form."""
        one, other = found.detach().reshape(-1).double(), exact.reshape(-1).double()
        sums = torch.stack([other.dot(other), one.dot(other), one.dot(one)])
        taken, known = sums.cpu(), self._sums.get(name)
        self._sums[name] = taken if known is None else known + taken

    def end_step(self, names: Sequence[str] = (), group: Group | RankGroup = ALONE) -> None:
        checked, self._steps = self.checking, self._steps + 1
        if not checked:
            return
        names = names or sorted(self._sums)
        zero = torch.zeros(3, dtype=torch.float64)
        sums = torch.stack([self._sums.get(name, zero) for name in names])
        self._sums = {}
        if not isinstance(group, RankGroup):
            all_reduce(sums, group=group)
        exact, packed = sums[:, 0], sums[:, 1:3]
        self.compared = _worst(names, exact, packed)
        overflow = _first(names, ~exact.isfinite())
        if overflow and not self._told:
            _LOG.warning("the gradient of %r is not finite, packed or not", overflow)
            self._told = True
        # The loss scaler or the loop detects overflows.
        harmed = not overflow and not self._passes(self.compared)
        if any_rank(harmed, torch.device("cpu")):
            raise self._error(harmed)

    def _error(self, harmed: bool) -> GulliverError:
        smaller = self.wire.scaled and self.wire.block > min(BLOCKS)
        advice = f"take {replace(self.wire, block=min(BLOCKS))}, " if smaller else "take "
        advice += "a format with more bits, " + ("" if self.feedback else "error_feedback=True, ")
        advice += "or wire_gate=False"
        if not harmed:
            return GulliverError(
                f"communication_dtype={self.wire} harms gradients of other ranks of the model, "
                f"which name the parameter: {advice}"
            )
        (name, cosine), (other, norm) = self.compared["cosine"], self.compared["norm"]
        name = name if cosine < self._least else other
        return GulliverError(
            f"the gradient of {name!r} is too far from what it is without "
            f"communication_dtype={self.wire}: cosine {cosine:.4f} where {self._least} is "
            f"the least, norm off by {100 * norm:.1f} %: {advice}"
        )

    @property
    def _least(self) -> float:
        return COSINE_WITH_FEEDBACK if self.feedback else COSINE

    def _passes(self, compared: Mapping[str, tuple[str, float]]) -> bool:
        near = compared["norm"][1] <= NORM or self.feedback
        return compared["cosine"][1] >= self._least and near


def _first(names: Sequence[str], which: Tensor) -> str:
    return next((name for name, one in zip(names, which.tolist(), strict=True) if one), "")


def _worst(names: Sequence[str], exact: Tensor, packed: Tensor) -> dict[str, tuple[str, float]]:
    """Returns the smallest cosine and the largest norm ratio, each with its parameter."""
    errors = (exact + packed[:, 1] - 2 * packed[:, 0]).clamp(min=0)
    worst = {"cosine": ("", 1.0), "norm": ("", 0.0)}
    least = MATTERS * float(errors.nan_to_num(0.0, 0.0, 0.0).sum())
    rows = zip(names, exact.tolist(), packed.tolist(), errors.tolist(), strict=True)
    for name, whole, (dot, found), error in rows:
        if not math.isfinite(found):  # packing overflowed
            return {"cosine": (name, -1.0), "norm": (name, math.inf)}
        if whole == 0 or error <= least:
            continue
        cosine = dot / math.sqrt(found * whole) if found else 0.0
        norm = abs(math.sqrt(found / whole) - 1)
        if cosine < worst["cosine"][1]:
            worst["cosine"] = name, cosine
        if norm > worst["norm"][1]:
            worst["norm"] = name, norm
    return worst
