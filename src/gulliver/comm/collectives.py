"""Collectives, made of point-to-point messages over gloo; other backends use their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import all_gather_flat, reduce_scatter_flat
from gulliver.comm.groups import RankGroup, rank_group_of, sends_directly
from gulliver.comm.host import host_team
from gulliver.comm.messages import check_wire
from gulliver.comm.packed import (
    Packer,
    check_packed,
    packed_all_gather,
    packed_all_reduce,
    packed_reduce_scatter,
    run_packed,
)
from gulliver.comm.steps import (
    DIRECT_BYTES,
    Steps,
    drive,
    segmented_all_gather,
    segmented_all_reduce,
    segmented_reduce_scatter,
    start,
)
from gulliver.comm.torus import (
    Torus,
    chained_all_gather,
    chained_all_reduce,
    chained_reduce_scatter,
    exchange_and_add,
    run_chained,
)
from gulliver.comm.watchdog import ANY, Purpose, count_sent, flight_recorder
from gulliver.errors import GulliverError, check_known
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.costs import RING_BYTES, host_seconds, torus_links, torus_seconds
from gulliver.precision.wire.formats import IDENTITY, WireFormat
from gulliver.precision.wire.packing import pack, unpack

# Collectives on flat tensors, which also work in a world of one.
#
# Gloo silently reads the storage of a view from its start, outside of the view; so every tensor is
# checked to be contiguous before it is sent.


Op = Literal["sum", "mean", "max"]
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
Group = dist.ProcessGroup | Torus | None
"""Participating ranks; None for all ranks."""


class Handle:
    """A collective in flight; its result may be read after `wait`."""

    def __init__(self, *works: Any, finish: Callable[[], Any] | None = None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work in works:
            work.wait()
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def group_size(group: Group = None) -> int:
    if isinstance(group, Torus):
        return group.size
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: Group = None) -> int:
    """Returns this process's rank in a group."""
    if isinstance(group, Torus):
        return group.rank
    return dist.get_rank(group) if dist.is_initialized() else 0


def all_reduce(
    tensor: Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    any_order: bool = False,
    wire: WireFormat = IDENTITY,
    purpose: Purpose = ANY,
    error: Tensor | None = None,
    finish: Callable[[], None] | None = None,
) -> Handle:
    """Reduces `tensor` over all ranks, in place on every rank.

    Args:
        tensor: contiguous tensor of any shape.
        op: sum, mean or max.
        group: None for all ranks.
        async_op: return immediately; the result may be read after `Handle.wait`.
        any_order: allow gloo's own ring for large tensors on more than two ranks. It uses less CPU
            time. Results are reproducible and equal on all ranks, but their rounding changes if the
            tensor is split differently.
        wire: wire format of the elements.
        purpose: what the collective is for, the same on all ranks; gloo reports differences.
        error: rounding error of the previous compression, added to the tensor and then replaced by
            the error of this one. Unused without compression.
        finish: callback on a background thread when the result is complete; compression only.
    """
    _check(tensor, op)
    _check_sum(tensor.dtype)
    size = group_size(group)
    if wire is not IDENTITY:
        check_wire(wire)
        wire = wire.of(tensor, tensor.numel() // size)
    if size == 1:
        return Handle()
    if wire is not IDENTITY:
        packer = _packer(wire, op, group, tensor, purpose)
        tensor = tensor.detach()
        steps = packed_all_reduce(tensor, op == "mean", packer, error)
        return _finished(Handle(*run_packed(steps, packer, [tensor], finish)), async_op)
    if tensor.device.type == "cpu" and (team := host_team(group)) is not None:
        works = team.all_reduce(tensor, op, purpose, now=not async_op)
        if works is not None:
            return _finished(Handle(*works), async_op)
    rank_groups = _rank_groups(group)
    if not sends_directly(rank_groups[0].process_group, tensor):
        if isinstance(group, Torus):
            steps = partial(chained_all_reduce, tensor, op, rank_groups)
            return _finished(_chained_handle([tensor], steps), async_op)
        return backend_all_reduce(tensor, op, group, async_op)
    # A small all-reduce takes one exchange in this thread, while gloo's ring would take n - 1.
    small = tensor.nbytes <= DIRECT_BYTES
    plain = not isinstance(group, Torus) and not (small and not async_op)
    if plain and _backend_is_cheaper(tensor, op, size, any_order):
        # Only recorded: the backend has its own tags.
        flight_recorder.next_tag(rank_groups[0].process_group, 1, purpose)
        return backend_all_reduce(tensor, op, rank_groups[0].process_group, async_op)
    steps = segmented_all_reduce(tensor, op, rank_groups, purpose)
    return _sent(steps, rank_groups, async_op, here=small)


def backend_all_reduce(
    tensor: Tensor, op: Op = "sum", group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Handle:
    """Runs the backend's all-reduce, whose order of summation is unspecified over gloo."""
    count_sent(2 * tensor.nbytes * (1 - 1 / group_size(group)))
    work = dist.all_reduce(tensor, REDUCTIONS[op], group=group, async_op=True)
    return _finished(Handle(work, finish=_mean(tensor, op, group_size(group))), async_op)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    purpose: Purpose = ANY,
    wire: WireFormat = IDENTITY,
    error: Tensor | None = None,
) -> Handle:
    """Reduces `input` over all ranks and writes this rank's shard of the result to `output`.

    Over gloo, terms are added in rank order; with compression, this rank's own term is first.

    Args:
        output: flat tensor, 1 / size of the input; may be this rank's part of the input.
        input: flat tensor, whose part r goes to rank r.
        op: sum, mean or max.
        group: None for all ranks.
        async_op: return immediately; the result may be read after `Handle.wait`.
        accumulate_dtype: dtype of the sum and of `output`; may be wider than that of `input`.
        purpose: what the collective is for, the same on all ranks; gloo reports differences.
        wire: wire format of the elements.
        error: rounding error, as in `all_reduce`, with the size of the input.
    """
    _check(output, op)
    _check(input, op)
    _check_sum(output.dtype)
    size = group_size(group)
    if wire is not IDENTITY:
        check_wire(wire)
        wire = wire.of(input, output.numel())
    _check_parts(output, input, size, accumulate_dtype or input.dtype)
    if size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return Handle()
    if wire is not IDENTITY:
        packer = _packer(wire, op, group, input, purpose)
        output, input = output.detach(), input.detach()
        steps = packed_reduce_scatter(output, input, op == "mean", packer, error)
        # Most formats take about a byte per element.
        works = run_packed(steps, packer, [output, input], limited=input.numel())
        return _finished(Handle(*works), async_op)
    if (team := host_team(group)) is not None and team.takes(output, input, op):
        return _finished(Handle(team.reduce_scatter(output, input, op, purpose)), async_op)
    rank_groups = _rank_groups(group)
    if sends_directly(rank_groups[0].process_group, input):
        steps = segmented_reduce_scatter(output, input, op, rank_groups, purpose)
        return _sent(steps, rank_groups, async_op, input.nbytes - output.nbytes)
    if isinstance(group, Torus):
        chained = partial(chained_reduce_scatter, output, input, op, rank_groups)
        return _finished(_chained_handle([output, input], chained), async_op)
    count_sent(input.nbytes * (1 - 1 / size))
    if output.dtype != input.dtype:
        work, add_up = _exchanged(output, input, op, group)
        return _finished(Handle(work, finish=add_up), async_op)
    work = reduce_scatter_flat(output, input, REDUCTIONS[op], group=group, async_op=True)
    return _finished(Handle(work, finish=_mean(output, op, size)), async_op)


def all_gather(
    output: Tensor,
    input: Tensor,
    group: Group = None,
    async_op: bool = False,
    purpose: Purpose = ANY,
    wire: WireFormat = IDENTITY,
    add: bool = False,
) -> Handle:
    """Concatenates the inputs of all ranks into `output`.

    Args:
        output: flat tensor, as large as all inputs together; may contain this rank's input in its
            position.
        input: flat tensor of the same size on all ranks.
        group: None for all ranks.
        async_op: return immediately; the result may be read after `Handle.wait`.
        purpose: what the collective is for, the same on all ranks; gloo reports differences.
        wire: wire format of the elements. With compression, all ranks get bitwise equal, rounded
            results, even for their own part.
        add: add compressed elements to the content of `output`, which may have a narrower dtype.

    Raises:
        GulliverError: sizes or dtypes do not match, or `add` is used without compression.
    """
    _check(output, "sum")
    _check(input, "sum")
    size = group_size(group)
    if wire is not IDENTITY:
        check_wire(wire)
        wire = wire.of(input)
    _check_parts(input, output, size, input.dtype if add else None)
    if add and (wire is IDENTITY or size == 1):
        raise GulliverError("all_gather(add=True) needs a wire format")
    if size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return Handle()
    if wire is not IDENTITY:
        packer = _packer(wire, "sum", group, output, purpose)
        output, input = output.detach(), input.detach()
        steps = packed_all_gather(output, input, packer, add)
        works = run_packed(steps, packer, [output, input], limited=output.numel())
        return _finished(Handle(*works), async_op)
    if input.device.type == "cpu" and (team := host_team(group)) is not None:
        return _finished(Handle(team.all_gather(output, input, purpose)), async_op)
    rank_groups = _rank_groups(group)
    if sends_directly(rank_groups[0].process_group, input):
        steps = segmented_all_gather(output, input, rank_groups, purpose)
        return _sent(steps, rank_groups, async_op, output.nbytes - input.nbytes)
    if isinstance(group, Torus):
        chained = partial(chained_all_gather, output, input, rank_groups)
        return _finished(_chained_handle([output, input], chained), async_op)
    count_sent(output.nbytes * (1 - 1 / size))
    return _finished(Handle(all_gather_flat(output, input, group=group, async_op=True)), async_op)


def barrier(group: Group = None) -> None:
    """Waits until all ranks have called it."""
    if group_size(group) > 1:
        dist.barrier(_plain(group)[0])


def broadcast_object(value: Any, src: int = 0, group: Group = None) -> Any:
    """Returns the value that rank `src` of the group passed."""
    if group_size(group) == 1:
        return value
    box = [value]
    plain, place = _plain(group, src)
    dist.broadcast_object_list(box, group=plain, group_src=place)
    return box[0]


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Returns the objects of all ranks, in rank order."""
    if group_size(group) == 1:
        return [value]
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=_plain(group)[0])
    # A process group orders its ranks as the world does, a torus along its axes.
    return [values[_plain(group, r)[1]] for r in range(len(values))]


def broadcast(
    tensor: Tensor, src: int = 0, group: Group = None, wire: WireFormat = IDENTITY
) -> None:
    """Broadcasts `tensor` from rank `src` of the group, in place."""
    # In a wire format, all ranks get the same bits, including rank `src`.
    _check(tensor, "sum")
    check_wire(wire)
    wire = wire.of(tensor)
    if group_size(group) == 1:
        return
    plain, place = _plain(group, src)
    if wire is IDENTITY:
        dist.broadcast(tensor, group=plain, group_src=place)
        return
    packed = pack(tensor, wire)  # on other ranks, for its size
    dist.broadcast(packed, group=plain, group_src=place)
    unpack(packed, wire, tensor.numel(), out=tensor.detach().view(-1))


def _packer(wire: WireFormat, op: str, group: Group, whole: Tensor, purpose: Purpose) -> Packer:
    check_packed(op, wire)
    rank_groups = _rank_groups(group)
    gloo = sends_directly(rank_groups[0].process_group, whole)
    return Packer(wire, rank_groups, purpose, gloo)


def _rank_groups(group: Group) -> tuple[RankGroup, ...]:
    return group.rank_groups if isinstance(group, Torus) else (rank_group_of(group),)


def _plain(group: Group, rank: int = 0) -> tuple[dist.ProcessGroup | None, int]:
    if not isinstance(group, Torus):
        return group, rank
    rank_group = group.flat
    return rank_group.process_group, rank_group.group_order().index(rank)


def _sent(
    collectives: list[Steps],
    rank_groups: tuple[RankGroup, ...],
    async_op: bool,
    limited: int = 0,
    here: bool = False,
) -> Handle:
    if not async_op and len(collectives) == 1 and (here or len(rank_groups) > 1):
        # The caller has nothing else to do, and a thread would cost tens of microseconds.
        drive(collectives[0])
        return Handle()
    works = [start(steps, rank_groups, limited) for steps in collectives]
    return _finished(Handle(*works), async_op)


def _chained_handle(tensors: list[Tensor], steps: Callable[[], None]) -> Handle:
    return Handle(*run_chained(tensors, steps))


def _finished(handle: Handle, async_op: bool) -> Handle:
    if not async_op:
        handle.wait()
    return handle


def _mean(tensor: Tensor, op: Op, size: int) -> Callable[[], Any] | None:
    return (lambda: tensor.div_(size)) if op == "mean" else None


def _check(tensor: Tensor, op: str) -> None:
    check_known("reduction", op, REDUCTIONS)
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise GulliverError(f"the mean of {tensor.dtype} is not defined: reduce with 'sum'")
    if not tensor.is_contiguous():
        raise GulliverError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pass tensor.contiguous()"
        )


def _check_sum(dtype: torch.dtype) -> None:
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise GulliverError(
            f"{dtype} cannot be summed: use reduce_scatter with accumulate_dtype=torch.float32, or "
            "a wider dtype"
        )


def _backend_is_cheaper(tensor: Tensor, op: Op, size: int, any_order: bool) -> bool:
    """Whether gloo's own all-reduce is cheaper and its order of summation is acceptable."""
    # Gloo receives, adds and sends in one C++ thread, while our reduce-scatter and all-gather wake
    # Python for each message. Gloo takes about half the CPU time, which counts if the communicating
    # core also computes. The sum of two terms does not depend on their order; with more, gloo's
    # order depends on the position in the tensor. Its ring takes 2 (n - 1) messages in sequence
    # instead of 2, so tensors below `RING_BYTES` are exchanged directly.
    if os.environ.get("GULLIVER_ALL_REDUCE", "auto") == "direct":
        return False
    if op == "max" or tensor.dtype not in (torch.float32, torch.float64):
        return False
    return size == 2 or (any_order and tensor.nbytes >= RING_BYTES)


def _exchanged(
    output: Tensor, input: Tensor, op: Op, group: dist.ProcessGroup | None
) -> tuple[Any, Callable[[], Any]]:
    parts = input.view(group_size(group), -1)
    work, add_up = exchange_and_add(output, parts, op, group)

    def finish() -> None:
        add_up()
        if op == "mean":
            output.div_(len(parts))

    return work, finish


def _check_parts(part: Tensor, whole: Tensor, size: int, dtype: torch.dtype | None = None) -> None:
    if part.numel() * size != whole.numel() or part.dtype != (dtype or whole.dtype):
        raise GulliverError(
            f"{size} parts of {part.numel()} elements ({part.dtype}) do not match a full tensor of "
            f"{whole.numel()} elements ({whole.dtype})"
        )


def any_rank(flag: bool, device: torch.device) -> bool:
    votes = torch.tensor([float(flag)], device=device)
    all_reduce(votes, op="max")
    return bool(votes.item())


# Errors that every rank raises together.


T = TypeVar("T")


def raise_on_any_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Calls a function on every rank; raises on all ranks if it failed on any of them."""
    failure: Exception | None = None
    value: T | None = None
    try:
        value = function()
    except Exception as error:
        failure = error
    # No rank may continue to a collective that a failed rank never enters.
    reasons = gather_objects(
        None if failure is None else str(failure) or type(failure).__name__, group
    )
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise GulliverError(f"rank {rank} failed: {reason}")
    return value  # type: ignore[return-value]


# Chooses the torus for the collectives of a step, if any, by predicted seconds.
#
# All factorizations of the ranks into up to three axes are considered, on the links of a cluster;
# `gulliver.hardware` computes their cost. A torus is only chosen if it is predicted to be faster by
# a margin, because predictions are not more accurate than that.


MOST_AXES = 3
MARGIN = 0.05
"""Relative gain in predicted time that makes a torus worthwhile."""
NAMES = {2: ("outer", "inner"), 3: ("outer", "middle", "inner")}
"""Default axis names, by number of axes."""


@dataclass(frozen=True)
class ChosenAxes:
    """The chosen torus, or None, and the predictions behind the choice."""

    axes: dict[str, int]  # Name and size of each axis, outer to inner; empty for no torus
    # Ranks in row-major order of the axes; None for 0, 1, 2 ...
    order: tuple[int, ...] | None
    seconds: float  # Predicted seconds of the collectives along `best`, the fastest torus
    flat_s: float  # Predicted seconds without a torus
    best: dict[str, int]  # The fastest torus, chosen or not; empty if there is none

    def __str__(self) -> str:
        torus, flat = f"{1e3 * self.seconds:.3g} ms", f"{1e3 * self.flat_s:.3g} ms"
        if self.axes:
            return f"torus {self.axes}: {torus} against {flat} flat"
        return f"flat: {flat}" + (f" against {torus} as torus {self.best}" if self.best else "")


def choose_axes(
    cluster: Cluster, collectives: Sequence[tuple[str, int]], size: int | None = None
) -> ChosenAxes:
    """Chooses the axes that collectives should use (collective; rank 0 decides).

    Args:
        cluster: links between the ranks, measured or described.
        collectives: names ("all_reduce", "reduce_scatter", "all_gather") and bytes of each full
            tensor; `gulliver.hardware.costs.zero_collectives` lists those of ZeRO.
        size: expected number of ranks; None for the cluster's.

    Raises:
        GulliverError: the cluster has a different number of ranks.
    """
    if size is not None and cluster.size != size:
        raise GulliverError(
            f"the cluster {cluster.name!r} has {cluster.size} ranks, but there are {size} ranks: "
            f"pass cluster.resized({size}), or measure it with gulliver probe"
        )
    sizes, seconds, flat_s = fastest_torus(cluster, collectives)
    best = dict(zip(_names(cluster, sizes), sizes, strict=True))
    taken = best if seconds < (1 - MARGIN) * flat_s else {}
    # Ranks may have been given different clusters, but must use the same axes.
    return broadcast_object(
        ChosenAxes(taken, cluster.rank_order if taken else None, seconds, flat_s, best)
    )


def fastest_torus(
    cluster: Cluster, collectives: Sequence[tuple[str, int]]
) -> tuple[tuple[int, ...], float, float]:
    """Returns the sizes of the fastest torus, its seconds, and those of a flat group."""
    found = {sizes: torus_seconds(cluster, sizes, collectives) for sizes in tori(cluster.size)}
    flat = torus_links(cluster, [cluster.size])
    read = [host_seconds(flat, *collective) for collective in collectives]
    flat_s = sum(s for s in read if s is not None)  # a torus exchanges messages
    flat_s = flat_s or torus_seconds(cluster, [cluster.size], collectives)
    sizes = min(found, key=lambda sizes: (found[sizes], len(sizes)), default=())
    return sizes, found.get(sizes, flat_s), flat_s


def tori(ranks: int, axes: int = MOST_AXES) -> Iterator[tuple[int, ...]]:
    """Yields ordered factorizations of a number into two or more factors greater than 1."""
    for first in range(2, ranks // 2 + 1):
        if ranks % first == 0:
            yield first, ranks // first
            if axes > 2:
                yield from ((first, *rest) for rest in tori(ranks // first, axes - 1))


def _names(cluster: Cluster, sizes: tuple[int, ...]) -> Sequence[str]:
    own = [axis for axis in cluster.axes if axis.size > 1]
    if sizes == tuple(axis.size for axis in own):
        return [axis.name for axis in own]
    return NAMES.get(len(sizes), ())
