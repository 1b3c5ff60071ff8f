"""Sliding windows along a dim, and convolutions computed in chunks.

Along one dim, convolution, pooling and slicing take the same form: output `o` is computed from the
`span` positions that begin at ``first + o * stride``. Everything here is integer arithmetic, so
each rank computes the inputs that every rank needs, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from gulliver.errors import GulliverError, once_differentiable
from gulliver.layout.even import Interval
from gulliver.options import byte_size


@dataclass(frozen=True)
class SlidingWindow:
    """A window that slides along one dim."""

    first: int = 0  # Position at which the window of output 0 begins; negative in padding
    stride: int = 1  # Distance between the windows of neighbouring outputs
    span: int = 1  # Number of positions that a window covers

    def count(self, extent: int, after: int = 0) -> int:
        return max(0, (extent + after - self.first - self.span) // self.stride + 1)

    def needs(self, start: int, stop: int) -> Interval:
        """Returns the input positions that the outputs ``start:stop`` (at least one) depend on."""
        return start * self.stride + self.first, (stop - 1) * self.stride + self.first + self.span


IDENTITY = SlidingWindow()


def overlap(a: Interval, b: Interval) -> Interval:
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


# Convolutions computed in chunks, exactly, with backward.
#
#     chunked = chunk_convolutions(autoencoder, budget="1GiB")
#     autoencoder.decode(latents)
#     print(chunked.explain())          # every convolution and how it was split
#     chunked.off()
#
# A chunk consists of some samples and a box of output positions, halved along its longest dim until
# it fits; adjacent chunks both read their common border. Each chunk reads its part of the input,
# pads it like the full input and writes its part of the output. Backward uses the same chunks: a
# convolution's gradients only need its input, its weight and the gradient of its output, so nothing
# is recomputed.


# [Note: the index limit] Kernels with 32-bit indices return wrong results or crash if their input
# or output has 2^31 or more elements. So the limit applies to both the input and the output of a
# chunk, regardless of the budget.
INDEX_LIMIT = 2**31 - 1
"""Maximum number of elements that kernels with 32-bit indices support."""

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CALLS = (F.conv1d, F.conv2d, F.conv3d)

Box = tuple[Interval, ...]
"""Samples and output positions of a chunk."""


@dataclass(frozen=True)
class ConvPlan:
    """A convolution and the chunks in which it is computed."""

    windows: tuple[SlidingWindow, ...]  # Along the samples and each spatial dim
    extents: tuple[int, ...]  # Samples and input positions
    boxes: tuple[Box, ...]  # Chunks, which cover each output element once
    options: tuple[Any, ...]  # Stride, dilation and groups

    def read(self, x: Tensor, box: Box) -> Tensor:
        part, pads = self._inside(x, box), []
        for (start, stop), window, extent in zip(box, self.windows, self.extents, strict=True):
            first, last = window.needs(start, stop)
            low, high = overlap((first, last), (0, extent))
            pads = [low - first, last - high, *pads]
        return F.pad(part, pads[:-2]) if any(pads) else part

    def add_back(self, total: Tensor, found: Tensor, box: Box) -> None:
        """Adds the gradient of a chunk's input (see `read`) to the gradient of the full input."""
        region = self._inside(total, box)
        for dim, (interval, window) in enumerate(zip(box, self.windows, strict=True)):
            dim += dim > 0
            before = max(0, -window.needs(*interval)[0])
            found = found.narrow(dim, min(before, found.shape[dim]), region.shape[dim])
        region.add_(found)

    def written(self, out: Tensor, box: Box) -> Tensor:
        for dim, (start, stop) in enumerate(box):
            out = out.narrow(dim + (dim > 0), start, stop - start)
        return out

    def _inside(self, x: Tensor, box: Box) -> Tensor:
        for dim, (interval, window) in enumerate(zip(box, self.windows, strict=True)):
            low, high = overlap(window.needs(*interval), (0, self.extents[dim]))
            x = x.narrow(dim + (dim > 0), min(low, x.shape[dim + (dim > 0)]), high - low)
        return x


def boxes_of(
    outputs: Sequence[int],
    windows: Sequence[SlidingWindow],
    channels: tuple[int, int],
    limit: int,
    room: float,
) -> Iterator[Box]:
    """Splits the output into chunks whose input and output fit; splits samples first."""
    waiting: list[Box] = [tuple((0, count) for count in outputs)]
    while waiting:
        box = waiting.pop()
        sizes = [stop - start for start, stop in box]
        read = [w.needs(0, max(1, n)) for w, n in zip(windows, sizes, strict=True)]
        inputs = channels[0] * math.prod(stop - start for start, stop in read)
        made = channels[1] * math.prod(sizes)
        longest = 0 if sizes[0] > 1 else max(range(len(sizes)), key=sizes.__getitem__)
        if max(inputs, made) <= limit and inputs + made <= room:
            yield box
            continue
        if sizes[longest] <= 1:
            raise GulliverError(
                f"one output position of a convolution needs {inputs + made} elements of input and "
                f"output, but only {min(limit, int(room))} are allowed: use a larger budget"
            )
        start, stop = box[longest]
        middle = (start + stop) // 2
        halves = ((middle, stop), (start, middle))
        waiting += [(*box[:longest], half, *box[longest + 1 :]) for half in halves]


class ChunkedConvolutions:
    """Convolutions of a module that are computed in chunks; `off` restores them."""

    def __init__(self, module: nn.Module, budget: int | None, limit: int) -> None:
        # Sizes and number of chunks of each convolution's last call, by name.
        self.plans: dict[str, ConvPlan] = {}
        self._hooked: list[nn.Module] = []
        for name, part in module.named_modules():
            if isinstance(part, KINDS):
                vars(part)["_conv_forward"] = _Call(self, name, part, budget, limit)
                self._hooked.append(part)
        if not self._hooked:
            raise GulliverError("this module has no convolution to split")

    def off(self) -> None:
        for part in self._hooked:
            part.__dict__.pop("_conv_forward", None)
        self._hooked = []

    def explain(self) -> str:
        """Describes how each convolution was split in its last call."""
        lines = [f"{name}: {len(plan.boxes)} pieces" for name, plan in self.plans.items()]
        return "\n".join(lines or ["no convolution was called yet"])


def chunk_convolutions(
    module: nn.Module, budget: str | int | None = "1GiB", limit: int = INDEX_LIMIT
) -> ChunkedConvolutions:
    """Splits all convolutions of a module into chunks, in place.

    Args:
        module: any module; convolutions with one to three dims are split, transposed ones are not.
        budget: bytes of input and output of a chunk, such as "512MiB"; None splits at the
            index limit only.
        limit: maximum elements of the input or the output of a chunk.

    Raises:
        GulliverError: the budget is not a size, or there is no convolution.
    """
    return ChunkedConvolutions(module, byte_size("budget", budget) if budget else None, limit)


class _Call:
    def __init__(
        self, owner: ChunkedConvolutions, name: str, like: Any, budget: int | None, limit: int
    ) -> None:
        self.owner, self.name, self.like = owner, name, like
        self.budget, self.limit = budget, limit

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        like = self.like
        padding = like.padding
        if like.padding_mode != "zeros":
            x, padding = F.pad(x, like._reversed_padding_repeated_twice, like.padding_mode), "valid"
        options = like.stride, padding, like.dilation, like.groups
        return chunked_convolution(x, weight, bias, *options, call=self)


def chunked_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
    call: Any = None,
) -> Tensor:
    if has_torch_function_unary(input):
        arguments = input, weight, bias, stride, padding, dilation, groups
        return handle_torch_function(chunked_convolution, (input,), *arguments, call=call)
    if input.dim() == weight.dim() - 1:
        how = stride, padding, dilation, groups, call
        return chunked_convolution(input.unsqueeze(0), weight, bias, *how).squeeze(0)
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    kernel = tuple(weight.shape[2:])
    pads = padding_of(padding, kernel, dilation)
    around = zip(pads, stride, dilation, kernel, strict=True)
    windows = (IDENTITY, *(SlidingWindow(-p[0], s, d * (k - 1) + 1) for p, s, d, k in around))
    extents = (input.shape[0], *input.shape[2:])
    behind = (0, *(after for _, after in pads))
    outputs = [w.count(e, a) for w, e, a in zip(windows, extents, behind, strict=True)]
    room = math.inf if call.budget is None else call.budget / input.element_size()
    boxes = boxes_of(outputs, windows, (input.shape[1], weight.shape[0]), call.limit, room)
    plan = ConvPlan(windows, extents, tuple(boxes), (tuple(stride), tuple(dilation), groups))
    call.owner.plans[call.name] = plan
    return _InPieces.apply(input, weight, bias, plan, outputs)


def padding_of(
    padding: Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(p), int(p)) for p in padding)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan, outputs: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = plan, bias is not None
        stride, dilation, groups = plan.options
        out = x.new_empty(outputs[0], weight.shape[0], *outputs[1:])
        convolve = CALLS[len(stride) - 1]
        for box in plan.boxes:
            made = convolve(plan.read(x, box), weight, bias, stride, 0, dilation, groups)
            plan.written(out, box).copy_(made)
        return out

    @staticmethod
    @once_differentiable("a convolution in pieces (chunk_convolutions)")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        plan, biased = ctx.how
        wanted = ctx.needs_input_grad
        stride, dilation, groups = plan.options
        zeros = [0] * len(stride)
        of_x = torch.zeros_like(x) if wanted[0] else None
        # Sums over many chunks are accumulated in float32 and rounded once.
        wide = torch.float32 if x.element_size() == 2 else None
        of_weight = torch.zeros_like(weight, dtype=wide)
        for box in plan.boxes:
            found = torch.ops.aten.convolution_backward(
                plan.written(grad, box), plan.read(x, box), weight, None, stride, zeros, dilation,
                False, zeros, groups, [wanted[0], wanted[1], False],
            )  # fmt: skip
            if of_x is not None:
                plan.add_back(of_x, found[0], box)
            if wanted[1]:
                of_weight.add_(found[1])
        of_bias = grad.sum([0, *range(2, grad.dim())]) if biased and wanted[2] else None
        return of_x, of_weight.to(weight.dtype) if wanted[1] else None, of_bias, None, None
