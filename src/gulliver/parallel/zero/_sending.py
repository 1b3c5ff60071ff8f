"""Sends gradients on their way, in a wire format where one is chosen, and watches what that costs.

`GradientSender.send` begins the reduction of a chunk. In a wire format it may keep what packing has
lost and add it to the next gradient (error feedback); that is not saved: after a load, and when
chunks are cut anew, it begins with nothing.

[Note: the gate] A format that harms does so silently: the loss goes down, more slowly. So in the
first steps, and in every hundredth after them, gradients are also reduced as they are, and compared
for every parameter: the cosine between the two, and the ratio of their norms. A parameter that is
off ends the run on all ranks, with its name. What is too small to matter beside the error of all is
passed over: the bias of an attention's keys has no gradient but rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver.comm import (
    ALONE,
    IDENTITY,
    Group,
    Handle,
    RankGroup,
    WireFormat,
    all_reduce,
    any_rank,
    group_size,
    reduce_scatter,
)
from gulliver.errors import GulliverError
from gulliver.parallel.zero._sharded import ShardedChunk

FIRST_CHECKS, CHECK_EVERY = 3, 100
"""Steps whose gradients are compared: the first ones, and one in so many after them."""
COSINE, COSINE_WITH_FEEDBACK = 0.995, 0.9
"""Least cosine between gradients; what error feedback makes up for may be further off."""
NORM = 0.1
"""Most that a norm may differ, relative."""
MATTERS = 1e-3
"""Share of the whole error from which on that of a parameter is looked at."""


@dataclass(frozen=True)
class ZeroWires:
    """Formats in which chunks travel.

    Attributes:
        reduce: format of gradients.
        feedback: whether what packing loses of a gradient is added to the next one.
        gate: whether gradients are compared with unpacked ones now and then.
    """

    reduce: WireFormat = IDENTITY
    feedback: bool = False
    gate: bool = True


class GradientSender:
    """Begins the reductions of chunks.

    Args:
        group: process group to average over.
        wires: formats.

    Attributes:
        gate: compares gradients with unpacked ones.
    """

    def __init__(self, group: Group, wires: ZeroWires) -> None:
        self.group, self.wires = group, wires
        self._lost: dict[int, Tensor] = {}
        self._references: dict[int, Tensor] = {}
        packs = wires.reduce.name != "identity" and group_size(group) > 1
        self._feeds = packs and wires.feedback
        self.gate = GradientGate(wires.reduce, wires.feedback, packs and wires.gate)

    def send(self, sharded: ShardedChunk) -> tuple[Tensor, Handle]:
        """Sends a chunk's gradients; returns where their mean will be, and when."""
        chunk, why = sharded.chunk, sharded.purpose("reduces", "in a backward")
        assert chunk.gradient is not None
        lost = self._lost_of(sharded, chunk.gradient) if self._feeds else None
        if chunk.layout.parts == 1:
            if sharded.reduced_in_place:
                buffer = chunk.take_gradient()
            else:
                # The optimizer steps float32: an all-reduce has no wider sum, so float32 travels.
                buffer = chunk.take_reduced()
                buffer.copy_(chunk.gradient)
            if self.checking:
                reference = self._references[id(sharded)] = buffer.clone()
                all_reduce(reference, "mean", self.group, purpose=why)
            wire = self.wires.reduce
            return buffer, all_reduce(
                buffer, "mean", self.group, async_op=True, purpose=why, wire=wire, error=lost
            )
        incoming = chunk.take_reduced()
        if self.checking:
            reference = self._references[id(sharded)] = torch.empty_like(incoming)
            dtype = chunk.home.dtype
            reduce_scatter(
                reference,
                chunk.gradient,
                "mean",
                self.group,
                accumulate_dtype=dtype,
                purpose=why,
            )
        # Sixteen bits travel, or fewer, and are added up in the dtype of the optimizer.
        handle = reduce_scatter(
            incoming,
            chunk.gradient,
            "mean",
            self.group,
            async_op=True,
            accumulate_dtype=chunk.home.dtype,
            purpose=why,
            wire=self.wires.reduce,
            error=lost,
        )
        return incoming, handle

    def _lost_of(self, sharded: ShardedChunk, gradient: Tensor) -> Tensor:
        if id(sharded) not in self._lost:
            self._lost[id(sharded)] = torch.zeros_like(gradient)
        return self._lost[id(sharded)]

    @property
    def checking(self) -> bool:
        """Whether the gradients of this step are compared."""
        return self.gate.checking

    def landed(self, sharded: ShardedChunk, incoming: Tensor) -> None:
        """Compares a chunk's gradient that has arrived."""
        reference = self._references.pop(id(sharded), None)
        if reference is None:
            return
        for piece in sharded.chunk.layout.pieces(sharded.chunk.part):
            run = slice(piece.start, piece.end)
            self.gate.add(piece.name, incoming[run], reference[run])

    def settled(self, names: Sequence[str], cut: bool) -> None:
        """A step has all its gradients; every rank calls it.

        Args:
            names: names of all parameters, the same on all ranks of the group.
            cut: whether each rank has a part of them.

        Raises:
            GulliverError: what was packed is too far from what it was, on all ranks.
        """
        self.gate.end_step(names, self.group if cut else ALONE)


class GradientGate:
    """Compares gradients that were packed with those that were not; see the note above.

    Args:
        wire: format of gradients.
        feedback: whether what packing loses is made up for later.
        on: whether anything is compared.

    Attributes:
        compared: least cosine and largest relative difference of norms of the last check, with the
            names of their parameters; empty before one.
    """

    def __init__(self, wire: WireFormat, feedback: bool, on: bool) -> None:
        self.wire, self.feedback, self.on = wire, feedback, on
        self.compared: dict[str, tuple[str, float]] = {}
        self._steps = 0
        self._sums: dict[str, Tensor] = {}

    @property
    def checking(self) -> bool:
        """Whether the gradients of this step are compared."""
        return self.on and (self._steps < FIRST_CHECKS or self._steps % CHECK_EVERY == 0)

    def add(self, name: str, found: Tensor, exact: Tensor) -> None:
        """Takes a gradient, or a part of one, packed and not."""
        one, other = found.detach().reshape(-1).double(), exact.reshape(-1).double()
        sums = torch.stack([one.dot(other), one.dot(one), other.dot(other)]).cpu()
        known = self._sums.get(name)
        self._sums[name] = sums if known is None else known + sums

    def end_step(self, names: Sequence[str] = (), group: Group | RankGroup = ALONE) -> None:
        """Judges what was taken in a step; every rank calls it.

        Args:
            names: names of the parameters, the same on all ranks of the group.
            group: process group whose ranks have a part each; `ALONE` where each has the whole.

        Raises:
            GulliverError: a gradient is too far off, on all ranks of the world.
        """
        checked, self._steps = self.checking, self._steps + 1
        if not checked:
            return
        names = names or sorted(self._sums)
        zero = torch.zeros(3, dtype=torch.float64)
        sums = torch.stack([self._sums.get(name, zero) for name in names])
        self._sums = {}
        if not isinstance(group, RankGroup):
            all_reduce(sums, group=group)
        error = self._judged(names, sums)
        others = any_rank(error is not None, torch.device("cpu"))
        if error is not None:
            raise error
        if others:
            raise GulliverError(
                f"communication_dtype={self.wire} harms gradients of other ranks of the "
                "model, which name the parameter"
            )

    def _judged(self, names: Sequence[str], sums: Tensor) -> GulliverError | None:
        least = COSINE_WITH_FEEDBACK if self.feedback else COSINE
        errors = (sums[:, 1] + sums[:, 2] - 2 * sums[:, 0]).clamp(min=0)
        whole, worst = float(errors.sum()), ("", 1.0)
        self.compared = {"cosine": worst, "norm": ("", 0.0)}
        if not math.isfinite(whole):
            return None  # an overflow, which the loss scaler or the loop looks for
        for name, (dot, found, exact), error in zip(
            names, sums.tolist(), errors.tolist(), strict=True
        ):
            if exact == 0 or error <= MATTERS * whole:
                continue
            cosine = dot / math.sqrt(found * exact) if found else 0.0
            norm = abs(math.sqrt(found / exact) - 1)
            if cosine < self.compared["cosine"][1]:
                self.compared["cosine"] = name, cosine
            if norm > self.compared["norm"][1]:
                self.compared["norm"] = name, norm
        (name, cosine), (other, norm) = self.compared["cosine"], self.compared["norm"]
        if cosine >= least and (norm <= NORM or self.feedback):
            return None
        name = name if cosine < least else other
        return GulliverError(
            f"the gradient of {name!r} is too far from what it is without "
            f"communication_dtype={self.wire}: cosine {cosine:.4f} where {least} is "
            f"the least, norm off by {100 * norm:.1f} %: take a format with more bits, "
            + ("" if self.feedback else "error_feedback=True, ")
            + "or wire_gate=False"
        )
