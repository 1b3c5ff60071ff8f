"""Collectives on flat tensors that are right in a world of one too.

Gloo reads the storage of a view from its start, outside the view, without a word; so every tensor
is checked to be contiguous before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import all_gather_flat, reduce_scatter_flat
from gulliver.comm._exchange import direct_all_gather, direct_reduce_scatter, sends_directly
from gulliver.comm._progress import Exchange, Step, start
from gulliver.comm._torus import Torus, torus_all_gather, torus_reduce_scatter
from gulliver.errors import GulliverError, nearest

Op = Literal["sum", "mean", "max"]
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
Group = dist.ProcessGroup | Torus | None
"""Ranks that take part; None is the whole world."""
SEGMENT_BYTES = 2 * 2**20
"""Larger all-reduces over several axes go in pieces, so that all axes are busy at once."""


class Handle:
    """A collective under way: `wait` returns when its result may be read; again is no harm."""

    def __init__(self, work: Any = None, finish: Callable[[], Any] | None = None) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        """Waits for the result."""
        work, finish = self._work, self._finish
        self._work = self._finish = None
        if work is not None:
            work.wait()
        if finish is not None:
            finish()


def group_size(group: Group = None) -> int:
    """Ranks of a group; None is the whole world."""
    if isinstance(group, Torus):
        return group.size
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: Group = None) -> int:
    """This process's place in a group."""
    if isinstance(group, Torus):
        return group.rank
    return dist.get_rank(group) if dist.is_initialized() else 0


def all_reduce(
    tensor: Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Replaces `tensor` on every rank by the reduction over all ranks."""
    _check(tensor, op)
    size = group_size(group)
    if size == 1:
        return Handle()
    if _directly(group, tensor):
        return _finished(_all_reduce_directly(tensor, op, group, size), async_op)
    if isinstance(group, Torus):
        return _finished(_along_axes(group, lambda: _flat_all_reduce(tensor, op, group)), async_op)
    work = dist.all_reduce(tensor, REDUCTIONS[op], group=group, async_op=True)
    return _finished(Handle(work, _mean(tensor, op, size)), async_op)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    accumulate_dtype: torch.dtype | None = None,
) -> Handle:
    """Writes this rank's part of the reduction of `input` to `output`.

    Over gloo the terms are added in the order of the ranks.

    Args:
        output: flat, 1 / size of the input; it may be this rank's part of the input itself.
        input: flat; part r of it goes to rank r.
        op: sum, mean or max.
        group: None for the whole world.
        async_op: return at once; the result may be read after `Handle.wait`.
        accumulate_dtype: of the sum and of `output`, where it is wider than what travels.
    """
    _check(output, op)
    _check(input, op)
    size = group_size(group)
    _check_parts(output, input, size, accumulate_dtype or input.dtype)
    if size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return Handle()
    if _directly(group, input):
        return _finished(Handle(start(_scatter_step(output, input, op, group))), async_op)
    if isinstance(group, Torus):
        return _finished(
            _along_axes(group, lambda: _flat_reduce_scatter(output, input, op, group)), async_op
        )
    if output.dtype != input.dtype:
        started = _exchanged(output, input, op, group)
        return _finished(Handle(*started), async_op)
    work = reduce_scatter_flat(output, input, REDUCTIONS[op], group=group, async_op=True)
    return _finished(Handle(work, _mean(output, op, size)), async_op)


def all_gather(
    output: Tensor,
    input: Tensor,
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Writes the inputs of all ranks, one after the other, to `output`.

    Args:
        output: flat, as large as all inputs together; it may contain this rank's input in its
            place.
        input: flat, of one size on all ranks.
        group: None for the whole world.
        async_op: return at once; the result may be read after `Handle.wait`.
    """
    _check(output, "sum")
    _check(input, "sum")
    size = group_size(group)
    _check_parts(input, output, size)
    if size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return Handle()
    if _directly(group, input):
        return _finished(Handle(start(_gather_step(output, input, group))), async_op)
    if isinstance(group, Torus):
        return _finished(
            _along_axes(group, lambda: _flat_all_gather(output, input, group)), async_op
        )
    return _finished(Handle(all_gather_flat(output, input, group=group, async_op=True)), async_op)


def barrier(group: Group = None) -> None:
    """Returns when all ranks have called it."""
    if group_size(group) > 1:
        dist.barrier(_plain(group))


def broadcast_object(value: Any, src: int = 0, group: Group = None) -> Any:
    """The value that rank `src` of the group passed."""
    if group_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=_plain(group), group_src=src)
    return box[0]


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """The values that all ranks passed, in the order of the ranks."""
    if group_size(group) == 1:
        return [value]
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=_plain(group))
    return values


def broadcast(tensor: Tensor, src: int = 0, group: Group = None) -> None:
    """Replaces `tensor` on every rank by that of rank `src` of the group."""
    _check(tensor, "sum")
    if group_size(group) > 1:
        dist.broadcast(tensor, group=_plain(group), group_src=src)


def _plain(group: Group) -> dist.ProcessGroup | None:
    """What torch knows: a torus is the whole world."""
    return None if isinstance(group, Torus) else group


def _finished(handle: Handle, async_op: bool) -> Handle:
    if not async_op:
        handle.wait()
    return handle


def _mean(tensor: Tensor, op: Op, size: int) -> Callable[[], Any] | None:
    return (lambda: tensor.div_(size)) if op == "mean" else None


def _check(tensor: Tensor, op: str) -> None:
    if op not in REDUCTIONS:
        raise GulliverError(f"unknown reduction {op!r}: {nearest(op, REDUCTIONS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise GulliverError(f"the mean of {tensor.dtype} is not defined: reduce with 'sum'")
    if not tensor.is_contiguous():
        raise GulliverError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pass tensor.contiguous()"
        )


def _directly(group: Group, tensor: Tensor) -> bool:
    """Whether messages go from rank to rank here, in steps of our own."""
    return sends_directly(group.groups[0] if isinstance(group, Torus) else group, tensor)


def _scatter_step(
    output: Tensor,
    input: Tensor,
    op: Op,
    group: Group,
    after: Callable[[], Step | None] | None = None,
) -> Step:
    if isinstance(group, Torus):
        return torus_reduce_scatter(output, input, op, group, after)
    return direct_reduce_scatter(output, input, op, group, after)


def _gather_step(
    output: Tensor, input: Tensor, group: Group, after: Callable[[], Step | None] | None = None
) -> Step:
    if isinstance(group, Torus):
        return torus_all_gather(output, input, group, after)
    return direct_all_gather(output, input, group, after)


def _all_reduce_directly(tensor: Tensor, op: Op, group: Group, size: int) -> Handle:
    """A reduce-scatter followed by an all-gather, in pieces where there are several axes."""
    flat = tensor.view(-1)
    segment = max(size, SEGMENT_BYTES // tensor.itemsize // size * size)
    whole = flat.numel() // size * size
    pieces = [flat] if not isinstance(group, Torus) else list(flat[:whole].split(segment))
    if isinstance(group, Torus) and whole < flat.numel():
        pieces.append(flat[whole:])
    exchanges = [_piece_all_reduce(piece, op, group, size) for piece in pieces]
    return Handle(_Several(exchanges))


def _piece_all_reduce(flat: Tensor, op: Op, group: Group, size: int) -> Exchange:
    ragged = flat.numel() % size
    padded = flat.new_zeros(flat.numel() + size - ragged) if ragged else flat
    if ragged:
        padded[: flat.numel()] = flat
    own = padded.view(size, -1)[group_rank(group)]

    def finished() -> None:
        if ragged:
            flat.copy_(padded[: flat.numel()])

    gather = _gather_step(padded, own, group, finished)
    return start(_scatter_step(own, padded, op, group, lambda: gather))


class _Several:
    """Exchanges that are waited for as one."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges

    def wait(self) -> None:
        for exchange in self._exchanges:
            exchange.wait()


def _along_axes(torus: Torus, run: Callable[[], None]) -> Handle:
    """Runs chained collectives on a stream of their own, on devices that have streams."""
    if not torch.cuda.is_available() or torus.mesh is None or torus.mesh.device_type != "cuda":
        run()
        return Handle()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    return Handle(finish=lambda: torch.cuda.current_stream().wait_stream(side))


def _flat_reduce_scatter(output: Tensor, input: Tensor, op: Op, torus: Torus) -> None:
    sizes, part = torus.sizes, output.numel()
    backwards = [*reversed(range(len(sizes))), len(sizes)]
    left = input.view(*sizes, part).permute(backwards).contiguous().view(-1)
    for group, size in zip(reversed(torus.groups), reversed(sizes), strict=True):
        target = left.new_empty(left.numel() // size)
        reduce_scatter_flat(target, left, REDUCTIONS[op], group=group)
        left = target
    output.copy_(left.view_as(output))
    if op == "mean":
        output.div_(torus.size)


def _flat_all_gather(output: Tensor, input: Tensor, torus: Torus) -> None:
    sizes, part, gathered = torus.sizes, input.numel(), input.reshape(-1)
    for group, size in zip(torus.groups, sizes, strict=True):
        target = gathered.new_empty(gathered.numel() * size)
        all_gather_flat(target, gathered, group=group)
        gathered = target
    backwards = [*reversed(range(len(sizes))), len(sizes)]
    output.view(*sizes, part).copy_(gathered.view(*reversed(sizes), part).permute(backwards))


def _flat_all_reduce(tensor: Tensor, op: Op, torus: Torus) -> None:
    flat = tensor.view(-1)
    padded = flat.new_zeros(-(-flat.numel() // torus.size) * torus.size)
    padded[: flat.numel()] = flat
    own = padded.new_empty(padded.numel() // torus.size)
    _flat_reduce_scatter(own, padded, op, torus)
    _flat_all_gather(padded, own, torus)
    flat.copy_(padded[: flat.numel()])


def _exchanged(
    output: Tensor, input: Tensor, op: Op, group: Group
) -> tuple[Any, Callable[[], Any]]:
    """Parts go to their ranks as they are and are added up there, in `output`'s dtype."""
    size = group_size(group)
    received = torch.empty_like(input)
    work = dist.all_to_all_single(received, input, group=group, async_op=True)

    def add_up() -> None:
        first, *others = received.view(size, -1)
        output.copy_(first)
        for term in others:
            torch.maximum(output, term, out=output) if op == "max" else output.add_(term)
        if op == "mean":
            output.div_(size)

    return work, add_up


def _check_parts(part: Tensor, whole: Tensor, size: int, dtype: torch.dtype | None = None) -> None:
    if part.numel() * size != whole.numel() or part.dtype != (dtype or whole.dtype):
        raise GulliverError(
            f"{size} parts of {part.numel()} {part.dtype} do not make {whole.numel()} {whole.dtype}"
        )


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether any rank of the world passed True."""
    votes = torch.tensor([float(flag)], device=device)
    all_reduce(votes, op="max")
    return bool(votes.item())
