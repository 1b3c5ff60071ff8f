"""Sends gradients, in a wire format where one is chosen, and watches what that costs.

`GradientSender.send` begins the reduction of a chunk. In a wire format it may keep what packing has
lost and add it to the next gradient (error feedback). That is kept by parameter, where chunks are
cut anew and in checkpoints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gulliver.comm.collectives import (
    Group,
    Handle,
    all_reduce,
    any_rank,
    group_size,
    reduce_scatter,
)
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.parallel.zero.chunks import ShardedChunk
from gulliver.precision.wire.formats import BLOCKS, IDENTITY, WireFormat

_LOG = logging.getLogger("gulliver")
FIRST_CHECKS, CHECK_EVERY = 3, 100
"""Steps whose gradients are compared: the first ones, and one in so many after them."""
COSINE, COSINE_WITH_FEEDBACK = 0.995, 0.9
"""Least cosine between gradients; what error feedback makes up for may be further off."""
NORM = 0.1
"""Most that a norm may differ, relative."""
MATTERS = 1e-3
"""Share of the whole error from which on that of a parameter matters."""


# [Note: the gate] A format that harms does so silently: the loss goes down, more slowly. So in the
# first steps, and in every hundredth after them, gradients are also reduced as they are, and
# compared for every parameter: the cosine between the two, and the ratio of their norms. A
# parameter that is off ends the run on all ranks, with its name. What is too small to matter in
# the error of all is passed over: the bias of an attention's keys has no gradient but rounding
# errors.
@dataclass(frozen=True)
class ZeroWires:
    """Formats in which chunks travel."""

    reduce: WireFormat = IDENTITY
    gather: WireFormat = IDENTITY
    # Whether what packing loses of a gradient is added to the next one.
    feedback: bool = False
    # Whether gradients are compared with unpacked ones now and then.
    gate: bool = True

    def of_parameters(self, parts: int, part_size: int, dtype: torch.dtype) -> WireFormat:
        """Format that the parts of a chunk's parameters travel in."""
        none = torch.empty(0, dtype=dtype)
        return IDENTITY if parts == 1 else self.gather.of(none, part_size)


class GradientSender:
    """Begins the reductions of chunks."""

    def __init__(self, group: Group, wires: ZeroWires) -> None:
        self.group, self.wires = group, wires
        self._lost: dict[int, tuple[ShardedChunk, Tensor]] = {}
        self._given: dict[str, Tensor] = {}
        # What was reduced as it is, to compare with, of chunks in flight.
        self.references: dict[int, Tensor] = {}
        packs = wires.reduce.name != "identity" and group_size(group) > 1
        # Whether what packing loses is added to the next gradient.
        self.feeds = packs and wires.feedback
        # Compares gradients with unpacked ones.
        self.gate = GradientGate(wires.reduce, wires.feedback, packs and wires.gate)

    def send(self, sharded: ShardedChunk) -> tuple[Tensor, Handle]:
        """Sends a chunk's gradients; returns where their mean will be, and when."""
        chunk, why = sharded.chunk, sharded.purpose("reduces", "in a backward")
        assert chunk.gradients.buffer is not None
        lost = self._lost_of(sharded, chunk.gradients.buffer) if self.feeds else None
        if chunk.layout.parts == 1:
            if sharded.reduced_in_place:
                buffer = chunk.gradients.take()
            else:
                # The optimizer steps float32: an all-reduce has no wider sum, so float32 travels.
                buffer = chunk.gradients.take_reduced()
                buffer.copy_(chunk.gradients.buffer)

            if self.gate.on and self.gate.checking:
                exact = self.references[id(sharded)] = buffer.clone()
                all_reduce(exact, "mean", self.group, purpose=why)
            wire = self.wires.reduce
            return buffer, all_reduce(
                buffer, "mean", self.group, async_op=True, purpose=why, wire=wire, error=lost
            )
        incoming = chunk.gradients.take_reduced()
        gradient, dtype = chunk.gradients.buffer, chunk.master_shard.dtype

        if self.gate.on and self.gate.checking:
            exact = self.references[id(sharded)] = torch.empty_like(incoming)
            reduce_scatter(exact, gradient, "mean", self.group, accumulate_dtype=dtype, purpose=why)
        # Sixteen bits travel, or fewer, and are added up in the dtype of the optimizer.
        handle = reduce_scatter(
            incoming,
            gradient,
            "mean",
            self.group,
            async_op=True,
            accumulate_dtype=dtype,
            purpose=why,
            wire=self.wires.reduce,
            error=lost,
        )
        return incoming, handle

    def _lost_of(self, sharded: ShardedChunk, gradient: Tensor) -> Tensor:
        if id(sharded) not in self._lost:
            lost = torch.zeros_like(gradient)
            for name, view in sharded.chunk.named_views(lost).items():
                if name in self._given:
                    view.copy_(self._given.pop(name))
            self._lost[id(sharded)] = sharded, lost
        return self._lost[id(sharded)][1]

    def lost(self) -> dict[str, Tensor]:
        """What packing has lost of this rank's gradients so far, by parameter."""
        found = dict(self._given)
        for sharded, lost in self._lost.values():
            found |= sharded.chunk.named_views(lost)
        return found

    def take_lost(self, found: Mapping[str, Tensor]) -> None:
        """Goes on with what packing has lost, by parameter; what was lost here is forgotten."""
        self._lost, self._given = {}, dict(found) if self.feeds else {}

    def check_reduced(self, sharded: ShardedChunk, incoming: Tensor) -> None:
        """Compares a chunk's gradient that has arrived."""
        exact = self.references.pop(id(sharded), None)
        if exact is None:
            return
        for piece in sharded.chunk.layout.pieces(sharded.chunk.part):
            run = slice(piece.start, piece.end)
            self.gate.add(piece.name, incoming[run], exact[run])

    def end_step(self, names: Sequence[str], cut: bool) -> None:
        """A step has all its gradients; every rank calls it."""
        self.gate.end_step(names, self.group if cut else ALONE)


class GradientGate:
    """Compares gradients that were packed with those that were not; see the note above."""

    def __init__(self, wire: WireFormat, feedback: bool, on: bool) -> None:
        self.wire, self.feedback, self.on = wire, feedback, on
        # Least cosine and largest relative difference of norms of the last check, with the names of
        # their parameters; empty before one.
        self.compared: dict[str, tuple[str, float]] = {}
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self._told = False

    @property
    def checking(self) -> bool:
        """Whether the gradients of this step are compared."""
        return self.on and (self._steps < FIRST_CHECKS or self._steps % CHECK_EVERY == 0)

    def add(self, name: str, found: Tensor, exact: Tensor) -> None:
        """Takes a gradient, or a part of one, as it was packed and as it is."""
        one, other = found.detach().reshape(-1).double(), exact.reshape(-1).double()
        sums = torch.stack([other.dot(other), one.dot(other), one.dot(one)])
        taken, known = sums.cpu(), self._sums.get(name)
        self._sums[name] = taken if known is None else known + taken

    def end_step(self, names: Sequence[str] = (), group: Group | RankGroup = ALONE) -> None:
        """Judges what was taken in a step; every rank calls it."""
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
        # An overflow is looked for by the loss scaler or the loop.
        harmed = not overflow and not self._passes(self.compared)
        if any_rank(harmed, torch.device("cpu")):
            raise self._error(harmed)

    def _error(self, harmed: bool) -> GulliverError:
        """Makes the message: of this rank's parameters, or that others' are harmed."""
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
    """Returns the first of the names that are meant, or an empty text."""
    return next((name for name, one in zip(names, which.tolist(), strict=True) if one), "")


def _worst(names: Sequence[str], exact: Tensor, packed: Tensor) -> dict[str, tuple[str, float]]:
    """Returns the least cosine and the largest difference of norms, with their parameters."""
    errors = (exact + packed[:, 1] - 2 * packed[:, 0]).clamp(min=0)
    worst = {"cosine": ("", 1.0), "norm": ("", 0.0)}
    least = MATTERS * float(errors.nan_to_num(0.0, 0.0, 0.0).sum())
    rows = zip(names, exact.tolist(), packed.tolist(), errors.tolist(), strict=True)
    for name, whole, (dot, found), error in rows:
        if not math.isfinite(found):  # packing has made an overflow of it
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
