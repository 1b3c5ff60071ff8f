"""Arithmetic of sliding windows: which inputs an output needs, and how many outputs there are.

A convolution, a pooling and a slice are the same thing along one dim: output `o` is made from the
`span` positions that begin at ``first + o * stride``. Everything here is plain numbers, so that all
ranks compute each other's needs alike and no rank has to ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from gulliver.errors import GulliverError, once_differentiable
from gulliver.layout.even import Interval, deal, intervals
from gulliver.options import byte_size


@dataclass(frozen=True)
class SlidingWindow:
    """A window that slides along one dim."""

    first: int = 0  # Position at which the window of output 0 begins; negative in padding
    stride: int = 1  # Distance between the windows of neighbouring outputs
    span: int = 1  # Number of positions that a window covers

    def count(self, extent: int, after: int = 0) -> int:
        """Returns the number of outputs."""
        return max(0, (extent + after - self.first - self.span) // self.stride + 1)

    def needs(self, start: int, stop: int) -> Interval:
        """Returns the positions that outputs `start` up to `stop`, at least one, are made from."""
        return start * self.stride + self.first, (stop - 1) * self.stride + self.first + self.span


IDENTITY = SlidingWindow()


def overlap(a: Interval, b: Interval) -> Interval:
    """Returns the positions in both intervals; an empty interval has its ends alike."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


# Plans how one convolution is computed in pieces that fit a byte budget and 32-bit indices.
#
#     plan = plan_convolution((1, 128, 17, 720, 1280), (128, 128, 3, 3, 3), 4, budget=1 << 30)
#     plan.counts                       # pieces of the batch, outputs, inputs and each spatial dim
#
# A piece is some samples, some output channels and a box of output positions. Pieces of samples
# and positions only read their borders twice; pieces of output channels read the whole input
# again, and pieces of input channels are partial sums that have to be added up. So they are cut in
# this order, the longest spatial dim first, each no further than needed. Grouped convolutions are
# cut into whole groups before the channels of a group are.


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


# Convolutions computed in pieces, exactly, forward and backward.
#
#     chunked = chunk_convolutions(autoencoder, budget="1GiB")
#     autoencoder.decode(latents)
#     print(chunked.explain())          # every convolution and how it was cut
#     chunked.off()
#
# Each piece reads its part of the input, pads it as the whole would be padded and writes its part
# of the output. The backward goes over the same pieces: a convolution's gradients need its input,
# its weight and the gradient of its output only, so nothing is computed again.


KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CALLS = (F.conv1d, F.conv2d, F.conv3d)
HALVES = (torch.float16, torch.bfloat16)


class ChunkedConvolutions:
    """Convolutions of a module that are computed in pieces; `off` restores them."""

    def __init__(self, module: nn.Module, budget: int | None, limit: int) -> None:
        # Plan of each convolution's last call, by name.
        self.plans: dict[str, ConvPlan] = {}
        self._hooked: list[nn.Module] = []
        for name, part in module.named_modules():
            if isinstance(part, KINDS):
                vars(part)["_conv_forward"] = _Call(self, name, part, budget, limit)
                self._hooked.append(part)
        if not self._hooked:
            raise GulliverError("there is no convolution in this module to cut into pieces")

    def off(self) -> None:
        """Makes the convolutions compute as before."""
        for part in self._hooked:
            part.__dict__.pop("_conv_forward", None)
        self._hooked = []

    def explain(self) -> str:
        """Describes how each convolution was cut when it was called last."""
        lines = [f"{name}: {plan}" for name, plan in self.plans.items()]
        return "\n".join(lines or ["no convolution was called yet"])


def chunk_convolutions(
    module: nn.Module, budget: str | int | None = "1GiB", limit: int = INDEX_LIMIT
) -> ChunkedConvolutions:
    """Makes all convolutions of a module compute in pieces, in place.

    Args:
        module: any module; its convolutions of one to three dims are cut, transposed ones are not.
        budget: bytes of the input and the output of a piece, such as "512MiB"; None cuts at the
            index limit only.
        limit: most elements of the input or the output of a piece.

    Raises:
        GulliverError: the budget is no size, or there is no convolution.
    """
    return ChunkedConvolutions(module, byte_size("budget", budget) if budget else None, limit)


class _Call:
    """Stands in for a convolution's `_conv_forward`."""

    def __init__(
        self, owner: ChunkedConvolutions, name: str, like: Any, budget: int | None, limit: int
    ) -> None:
        self.owner, self.name, self.like = owner, name, like
        self.budget, self.limit = budget, limit

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        like = self.like
        how = like.stride, like.padding, like.dilation, like.groups
        return chunked_convolution(x, weight, bias, *how, mode=like.padding_mode, call=self)


def chunked_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
    mode: str = "zeros",
    call: Any = None,
) -> Tensor:
    """Computes a convolution in pieces where it does not fit the budget as a whole."""
    if has_torch_function_unary(input):
        arguments = input, weight, bias, stride, padding, dilation, groups
        return handle_torch_function(
            chunked_convolution, (input,), *arguments, mode=mode, call=call
        )
    if input.dim() == weight.dim() - 1:
        whole = input.unsqueeze(0)
        how = stride, padding, dilation, groups, mode, call
        return chunked_convolution(whole, weight, bias, *how).squeeze(0)
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    sizes = sizes_of(input, weight, stride, padding, dilation, groups)
    plan = plan_convolution(sizes, call.budget, call.limit)
    call.owner.plans[call.name] = plan
    return _InPieces.apply(input, weight, bias, plan, mode)


def sizes_of(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
) -> Convolution:
    """Returns the sizes of a convolution, the padding spelt out."""
    kernel = tuple(weight.shape[2:])
    return Convolution(
        x.shape[0],
        x.shape[1],
        weight.shape[0],
        tuple(x.shape[2:]),
        kernel,
        tuple(stride),
        padding_of(padding, kernel, dilation),
        tuple(dilation),
        groups,
        x.element_size(),
    )


def padding_of(
    padding: Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Returns the positions of padding before and behind each spatial dim."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(p), int(p)) for p in padding)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan, mode: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = plan, mode, bias is not None
        s = plan.sizes
        out = x.new_empty(s.batch, s.outputs, *s.out_extents)
        convolve = CALLS[len(s.kernel) - 1]
        for piece in plan.pieces():
            total = None
            for term in piece.terms:
                part = _weight_of(weight, piece, term)
                read = _read(x, plan, piece, term, mode)
                if len(piece.terms) > 1 and x.dtype in HALVES:
                    # Partial sums of half precision would be rounded once each.
                    read, part = read.float(), part.float()
                found = convolve(read, part, None, s.stride, 0, s.dilation, piece.groups)
                total = found if total is None else total.add_(found)
            assert total is not None
            if bias is not None:
                shift = bias[slice(*piece.outputs)]
                total += shift.view(-1, *[1] * len(s.kernel))
            _written(out, piece).copy_(total)
        return out

    @staticmethod
    @once_differentiable("a convolution in pieces (apply_chunked)")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        plan, mode, biased = ctx.how
        wanted = ctx.needs_input_grad
        s, half = plan.sizes, x.dtype in HALVES
        of_x = torch.zeros_like(x) if wanted[0] else None
        # Terms of many pieces: summed in single precision, rounded once.
        of_weight = torch.zeros_like(weight, dtype=torch.float32 if half else None)
        for piece in plan.pieces():
            own = _written(grad, piece)
            for term in piece.terms:
                read = _read(x, plan, piece, term, mode)
                part = _weight_of(weight, piece, term)
                zeros, mask = [0] * len(s.kernel), [wanted[0], wanted[1], False]
                options = s.stride, zeros, s.dilation, False, zeros, piece.groups, mask
                found = torch.ops.aten.convolution_backward(own, read, part, None, *options)
                if of_x is not None:
                    _add_back(of_x, found[0], plan, piece, term, mode)
                if wanted[1]:
                    _weight_of(of_weight, piece, term).add_(found[1])
        of_bias = grad.sum([0, *range(2, grad.dim())]) if biased and wanted[2] else None
        return of_x, of_weight.to(weight.dtype) if wanted[1] else None, of_bias, None, None


def _weight_of(weight: Tensor, piece: ConvPiece, term: tuple[int, int, int, int]) -> Tensor:
    return weight[slice(*piece.outputs), term[2] : term[3]]


def _written(out: Tensor, piece: ConvPiece) -> Tensor:
    part = out[slice(*piece.batch), slice(*piece.outputs)]
    for dim, (start, stop) in enumerate(piece.box):
        part = part.narrow(2 + dim, start, stop - start)
    return part


def _read(
    x: Tensor, plan: ConvPlan, piece: ConvPiece, term: tuple[int, int, int, int], mode: str
) -> Tensor:
    """Returns the input of a piece, with its part of the padding."""
    part, pads = x[slice(*piece.batch), term[0] : term[1]], []
    for dim, window in enumerate(plan.sizes.windows):
        start, stop, clipped = _extent(plan, piece, dim, window)
        pads = [clipped[0] - start, stop - clipped[1], *pads]
        if mode != "zeros" and (start, stop) != clipped:
            part = part.index_select(2 + dim, _mapped(start, stop, x.shape[2 + dim], mode, x))
        else:
            part = part.narrow(2 + dim, clipped[0], clipped[1] - clipped[0])
    return F.pad(part, pads) if mode == "zeros" and any(pads) else part


def _add_back(
    total: Tensor,
    found: Tensor,
    plan: ConvPlan,
    piece: ConvPiece,
    term: tuple[int, int, int, int],
    mode: str,
) -> None:
    """Adds the gradient of what `_read` returned to that of the input."""
    part = total[slice(*piece.batch), term[0] : term[1]]
    for dim, window in enumerate(plan.sizes.windows):
        start, stop, clipped = _extent(plan, piece, dim, window)
        if mode != "zeros" and (start, stop) != clipped:
            length = total.shape[2 + dim]
            shape = list(found.shape)
            shape[2 + dim] = length
            positions = _mapped(start, stop, length, mode, found)
            found = found.new_zeros(shape).index_add_(2 + dim, positions, found)
        else:
            part = part.narrow(2 + dim, clipped[0], clipped[1] - clipped[0])
            found = found.narrow(2 + dim, clipped[0] - start, clipped[1] - clipped[0])
    part.add_(found)


def _extent(
    plan: ConvPlan, piece: ConvPiece, dim: int, window: SlidingWindow
) -> tuple[int, int, tuple[int, int]]:
    """Returns the positions that a piece needs along a dim, and those of them that exist."""
    start, stop = window.needs(*piece.box[dim])
    return start, stop, overlap((start, stop), (0, plan.sizes.extents[dim]))


def _mapped(start: int, stop: int, length: int, mode: str, like: Tensor) -> Tensor:
    """Returns the positions that padding repeats, for positions that may lie outside."""
    at = torch.arange(start, stop, device=like.device)
    if mode == "circular":
        return at % length
    if mode == "reflect":
        at = at.abs()
        return torch.where(at < length, at, 2 * (length - 1) - at)
    return at.clamp(0, length - 1)
