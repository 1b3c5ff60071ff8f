"""Convolutions computed in pieces, exactly, forward and backward.

    chunked = chunk_convolutions(autoencoder, budget="1GiB")
    autoencoder.decode(latents)
    print(chunked.explain())          # every convolution and how it was cut
    chunked.off()

Each piece reads its part of the input, pads it as the whole would be padded and writes its part of
the output. The backward goes over the same pieces: a convolution's gradients need its input, its
weight and the gradient of its output only, so nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from gulliver.errors import GulliverError, once_differentiable
from gulliver.options import byte_size
from gulliver.parallel.convolution._plan import (
    INDEX_LIMIT,
    Convolution,
    ConvPiece,
    ConvPlan,
    plan_convolution,
)
from gulliver.parallel.convolution._windows import SlidingWindow, overlap

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
