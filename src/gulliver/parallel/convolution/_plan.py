"""Plans how one convolution is computed in pieces that fit a byte budget and 32-bit indices.

    plan = plan_convolution((1, 128, 17, 720, 1280), (128, 128, 3, 3, 3), 4, budget=1 << 30)
    plan.counts                       # pieces of the batch, outputs, inputs and each spatial dim

A piece is some samples, some output channels and a box of output positions. Pieces of samples and
positions only read their borders twice; pieces of output channels read the whole input again, and
pieces of input channels are partial sums that have to be added up. So they are cut in this order,
the longest spatial dim first, each no further than needed. Grouped convolutions are cut into whole
groups before the channels of a group are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from gulliver.errors import GulliverError
from gulliver.layout import Interval, deal, intervals
from gulliver.parallel.convolution._windows import SlidingWindow

INDEX_LIMIT = 2**31 - 1
"""Most elements that a kernel with 32-bit indices can count."""


# [Note: the index limit] Kernels that count elements in 32 bits compute nonsense, or crash, from
# 2^31 elements on, on whichever side is the larger. So the limit holds for the input of a piece and
# for its output, whatever the budget is.
@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution."""

    batch: int
    inputs: int
    outputs: int
    extents: tuple[int, ...]  # Input positions along each spatial dim
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Interval, ...]  # Positions of padding before and behind each spatial dim
    dilation: tuple[int, ...]
    groups: int = 1
    item: int = 4  # Bytes of an element

    @property
    def windows(self) -> tuple[SlidingWindow, ...]:
        """Windows along the spatial dims."""
        sizes = zip(self.padding, self.stride, self.dilation, self.kernel, strict=True)
        return tuple(SlidingWindow(-p[0], s, d * (k - 1) + 1) for p, s, d, k in sizes)

    @property
    def out_extents(self) -> tuple[int, ...]:
        """Output positions along each spatial dim."""
        sizes = zip(self.windows, self.extents, self.padding, strict=True)
        return tuple(window.count(extent, after) for window, extent, (_, after) in sizes)


@dataclass(frozen=True)
class ConvPiece:
    """A part of the output, and the parts of the input that it is the sum over."""

    batch: Interval
    outputs: Interval
    # Input channels of each term of the sum, and which of the weight's inputs they meet.
    terms: tuple[tuple[int, int, int, int], ...]
    groups: int
    box: tuple[Interval, ...]  # Output positions along each spatial dim


@dataclass(frozen=True)
class ConvPlan:
    """The pieces of one convolution."""

    sizes: Convolution
    batch: int = 1
    groups: int = 1
    outputs: int = 1  # Number of pieces of a group's output channels
    inputs: int = 1  # Number of pieces of a group's input channels
    space: tuple[int, ...] = field(default=())  # Number of pieces of each spatial dim

    @property
    def counts(self) -> dict[str, int]:
        """Number of pieces by what is cut; what is not cut is left out."""
        named = {"batch": self.batch, "groups": self.groups}
        named |= {f"dim {number}": count for number, count in enumerate(self.space)}
        named |= {"output channels": self.outputs, "input channels": self.inputs}
        return {name: count for name, count in named.items() if count > 1}

    @property
    def number(self) -> int:
        """Number of calls of the kernel."""
        return math.prod((self.batch, self.groups, self.outputs, self.inputs, *self.space))

    @property
    def largest(self) -> tuple[int, int]:
        """Elements of the input and of the output of the largest piece."""
        s = self.sizes
        batch, groups = -(-s.batch // self.batch), -(-s.groups // self.groups)
        inputs = groups * -(-(s.inputs // s.groups) // self.inputs)
        outputs = groups * -(-(s.outputs // s.groups) // self.outputs)
        box = [-(-extent // n) for extent, n in zip(s.out_extents, self.space, strict=True)]
        read = [w.needs(0, max(1, n)) for w, n in zip(s.windows, box, strict=True)]
        around = math.prod(stop - start for start, stop in read)
        return batch * inputs * around, batch * outputs * math.prod(box)

    @property
    def nbytes(self) -> int:
        """Bytes of the input and the output of the largest piece."""
        return sum(self.largest) * self.sizes.item

    def pieces(self) -> Iterator[ConvPiece]:
        """Yields the pieces; together they are the output, each element once."""
        s = self.sizes
        width_in, width_out = s.inputs // s.groups, s.outputs // s.groups
        boxes = [intervals(deal(e, n)) for e, n in zip(s.out_extents, self.space, strict=True)]
        cuts = [intervals(deal(s.batch, self.batch)), intervals(deal(s.groups, self.groups))]
        outs, ins = intervals(deal(width_out, self.outputs)), intervals(deal(width_in, self.inputs))
        for batch, group, out, *box in product(*cuts, outs, *boxes):
            # Several groups in a piece are whole: their channels are cut only when it is one group.
            last = group[1] - 1
            outputs = group[0] * width_out + out[0], last * width_out + out[1]
            terms = tuple((group[0] * width_in + a, last * width_in + b, a, b) for a, b in ins)
            yield ConvPiece(batch, outputs, terms, group[1] - group[0], tuple(box))

    def __str__(self) -> str:
        shown = ", ".join(f"{name} in {count}" for name, count in self.counts.items())
        return f"{shown or 'whole'}: {self.number} calls, {self.nbytes / 2**20:.1f} MiB each"


def plan_convolution(
    sizes: Convolution, budget: int | None = None, limit: int = INDEX_LIMIT
) -> ConvPlan:
    """Plans the fewest pieces that fit, the cheapest kind of cut first."""
    plan = ConvPlan(sizes, space=(1,) * len(sizes.extents))
    longest = sorted(range(len(sizes.extents)), key=lambda d: -sizes.out_extents[d])
    order = ["batch", "groups", *longest, "outputs", "inputs"]
    for cut in order:
        if fits(plan, budget, limit):
            return plan
        plan = _least(plan, cut, budget, limit)
    if not fits(plan, budget, limit):
        raise GulliverError(
            f"a convolution of kernel {sizes.kernel} cannot be cut into pieces of "
            f"{budget} bytes and {limit} elements: {plan.nbytes} bytes would do"
        )
    return plan


def fits(plan: ConvPlan, budget: int | None, limit: int) -> bool:
    """Returns whether the largest piece is within the budget and the index limit."""
    return max(plan.largest) <= limit and (budget is None or plan.nbytes <= budget)


def _least(plan: ConvPlan, cut: str | int, budget: int | None, limit: int) -> ConvPlan:
    """Returns the plan with the fewest pieces along one cut that fits, or with the most."""
    low, high = 1, _most(plan, cut)
    # Fewer elements with every further piece: the least count that fits is found by halving.
    while low < high:
        middle = (low + high) // 2
        if fits(_with(plan, cut, middle), budget, limit):
            high = middle
        else:
            low = middle + 1
    return _with(plan, cut, low)


def _most(plan: ConvPlan, cut: str | int) -> int:
    s = plan.sizes
    if isinstance(cut, int):
        return max(1, s.out_extents[cut])
    return {
        "batch": max(1, s.batch),
        "groups": s.groups,
        "outputs": s.outputs // s.groups,
        "inputs": s.inputs // s.groups,
    }[cut]


def _with(plan: ConvPlan, cut: str | int, count: int) -> ConvPlan:
    if isinstance(cut, int):
        space: Sequence[int] = [count if d == cut else n for d, n in enumerate(plan.space)]
        return replace(plan, space=tuple(space))
    return replace(plan, **{cut: count})
