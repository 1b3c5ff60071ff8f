"""Named axes over the ranks, and the torus that a collective may follow.

    axes = make_axes({"node": 2, "local": 4})          # outer to inner, slow to fast
    reduce_scatter(part, whole, group=axes.torus())    # like group=None, but axis by axis

Each rank is in one rank group per axis. A torus consists of the ranks along several axes, numbered
in row-major order: rank (o, i) is o * inner + i. Collectives accept a torus as their group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gulliver._compat import all_gather_flat, reduce_scatter_flat
from gulliver.comm.groups import ALONE, RankGroup, lasting_group, shared_rank_group
from gulliver.comm.watchdog import count_sent
from gulliver.errors import GulliverError, check_known


@dataclass(frozen=True, eq=False)
class Axes:
    """Named axes over all ranks."""

    sizes: Mapping[str, int]  # Outer to inner
    # World ranks by position along each axis; None in a world of one.
    ranks: Tensor | None
    device_type: str
    rank_groups: Mapping[str, RankGroup]  # This rank's group along each axis

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """Torch's mesh with the same names; None in a world of one rank."""
        if self.ranks is None:
            return None
        groups: list[Any] = [self.group(name) for name in self.sizes]
        return DeviceMesh.from_group(
            groups, self.device_type, self.ranks, mesh_dim_names=tuple(self.sizes)
        )

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Returns the process group along an axis; None in a world of one rank."""
        self._check((name,))
        return lasting_group(self.rank_group(name)) if self.ranks is not None else None

    def torus(self, *names: str, flat: bool = False) -> Torus:
        """Returns the ranks along some axes, by default all (collective).

        With `flat`, collectives use one group of all ranks instead of running axis by axis.
        """
        names = names or tuple(self.sizes)
        self._check(names)
        return Torus.along(self, names, flat)

    def rank_group(self, name: str) -> RankGroup:
        return self.rank_groups[name]

    def flat(self, names: Sequence[str]) -> RankGroup:
        if self.ranks is None:
            return ALONE
        rows = _rows(self.sizes, self.ranks, names)
        if len(rows) == 1:
            return RankGroup(tuple(rows[0]), rows[0].index(dist.get_rank()))
        rank_group = shared_rank_group(rows, "axes")
        # Passing on a group of None, without the rank group, would mean the whole world.
        return (
            rank_group
            if rank_group.size > 1
            else replace(rank_group, process_group=lasting_group(rank_group))
        )

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            check_known("axis", name, self.sizes)
        if list(names) != [name for name in self.sizes if name in names]:
            raise GulliverError(
                f"axes {', '.join(names)} must be named once, outer to inner, as in "
                f"{', '.join(self.sizes)}"
            )


class Torus:
    """Ranks along several axes; collectives run axis by axis.

    Args:
        axes: name and size of each, outer to inner; their product is the size of the world.
        order: world ranks in row-major order of the axes; None for 0, 1, 2 and so on. If nodes are
            numbered differently, list the ranks node by node.
        device_type: device type of the tensors.

    Attributes:
        axes: name and size of each, outer to inner.
        rank_groups: this rank's group along each axis with more than one rank, outer to inner.
        flat: rank group of all ranks, in row-major order.

    Raises:
        GulliverError: the product of the sizes is not the world size, or the order is not a
            permutation of the ranks.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        order: Sequence[int] | None = None,
        device_type: str = "cpu",
    ) -> None:
        self._torus(make_axes(axes, order, device_type), tuple(axes))

    @classmethod
    def along(cls, axes: Axes, names: tuple[str, ...], flat: bool = False) -> Torus:
        torus = cls.__new__(cls)
        torus._torus(axes, names, flat)
        return torus

    def _torus(self, axes: Axes, names: tuple[str, ...], flat: bool = False) -> None:
        self.axes = {name: axes.sizes[name] for name in names}
        self.rank_groups = tuple(axes.rank_group(name) for name in names if axes.sizes[name] > 1)
        self.flat = self.rank_groups[0] if len(self.rank_groups) == 1 else axes.flat(names)
        if flat:
            self.rank_groups = (self.flat,)

    @property
    def size(self) -> int:
        return self.flat.size

    @property
    def rank(self) -> int:
        return self.flat.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.flat.ranks

    def __repr__(self) -> str:
        return "Torus(" + " x ".join(f"{n} {s}" for n, s in self.axes.items()) + ")"


def make_axes(
    sizes: Mapping[str, int], order: Sequence[int] | None = None, device_type: str | None = None
) -> Axes:
    """Arranges all ranks on named axes (collective).

    Args:
        sizes: name and size of each axis, outer to inner; the innermost has the fastest links.
        order: world ranks in row-major order of the axes; None for 0, 1, 2 and so on. With ``[0, 2,
            1, 3]``, ranks 0 and 2 are neighbors on the innermost axis.
        device_type: device type of the tensors, "cpu" or "cuda"; None for "cuda" with NCCL,
            otherwise "cpu".

    Raises:
        GulliverError: the product of the sizes is not the world size, or the order is not a
            permutation of the ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not sizes or min(sizes.values()) < 1 or math.prod(sizes.values()) != world:
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise GulliverError(
            f"the axes {shown or '()'} do not match {world} ranks: their product must be {world}"
        )
    order = list(range(world)) if order is None else list(order)
    if sorted(order) != list(range(world)):
        raise GulliverError(f"the order {order} must name each of the {world} ranks once")
    if not dist.is_initialized():
        return Axes(dict(sizes), None, device_type or "cpu", dict.fromkeys(sizes, ALONE))
    if device_type is None:
        device_type = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    ranks = torch.tensor(order, device="cpu").view(*sizes.values())
    rank_groups = {name: shared_rank_group(_rows(sizes, ranks, (name,)), "axis") for name in sizes}
    return Axes(dict(sizes), ranks, device_type, rank_groups)


def _rows(sizes: Mapping[str, int], ranks: Tensor, names: Sequence[str]) -> list[list[int]]:
    places = [list(sizes).index(name) for name in names]
    last = list(range(-len(places), 0))
    count = math.prod(sizes[name] for name in names)
    return ranks.movedim(places, last).reshape(-1, count).tolist()


# Collectives over the axes of a torus by the backend's own collectives, one axis after the other.
#
# For backends without the point-to-point messages of `steps.py`, mainly NCCL. On a GPU, the steps
# are queued on a separate stream: the host never waits, and the compute stream waits for one event
# when the result is needed.
#
# Between two steps, the parts are reordered for the next axis by one copy in device memory, which
# is cheap compared with the saved communication.


_streams: dict[torch.device, torch.cuda.Stream] = {}


class OnStream:
    """Collectives queued on a side stream."""

    def __init__(self, device: torch.device, tensors: Sequence[Tensor], run: Callable[[], None]):
        self._stream = _streams.get(device)
        if self._stream is None:
            self._stream = _streams[device] = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            run()
            self._event = self._stream.record_event()
        for tensor in tensors:
            # If the caller frees it, its memory is not reused before the steps have run.
            tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Makes the current stream wait for the last collective."""
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


def run_chained(tensors: Sequence[Tensor], steps: Callable[[], None]) -> list[Any]:
    if tensors[0].is_cuda:
        return [OnStream(tensors[0].device, tensors, steps)]
    steps()
    return []


def chained_reduce_scatter(
    output: Tensor, input: Tensor, op: str, rank_groups: Sequence[RankGroup]
) -> None:
    parts = input.view(*(rank_group.size for rank_group in rank_groups), output.numel())
    for depth in reversed(range(len(rank_groups))):
        parts = _reduced(parts.movedim(depth, 0), op, rank_groups[depth], output.dtype)
    output.copy_(parts.view_as(output))
    if op == "mean":
        output.div_(math.prod(rank_group.size for rank_group in rank_groups))


def chained_all_gather(output: Tensor, input: Tensor, rank_groups: Sequence[RankGroup]) -> None:
    parts = input.view(-1)
    for depth, rank_group in enumerate(rank_groups):
        parts = _gathered(parts.contiguous(), rank_group).movedim(0, depth)
    output.view(parts.shape).copy_(parts)


def chained_all_reduce(tensor: Tensor, op: str, rank_groups: Sequence[RankGroup]) -> None:
    """Reduce-scatters along the inner axes, all-reduces along the outermost, then all-gathers."""
    count = math.prod(rank_group.size for rank_group in rank_groups[1:])
    flat = tensor.view(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % count))
    shard = padded
    for rank_group in reversed(rank_groups[1:]):
        shard = _reduced(shard.view(rank_group.size, -1), op, rank_group, shard.dtype)
    count_sent(2 * shard.nbytes * (1 - 1 / rank_groups[0].size))
    work = dist.all_reduce(shard, _operator(op), group=rank_groups[0].process_group, async_op=True)
    assert work is not None
    work.wait()
    if op == "mean":
        shard.div_(math.prod(rank_group.size for rank_group in rank_groups))
    for rank_group in rank_groups[1:]:
        shard = _gathered(shard.view(-1), rank_group)
    flat.copy_(shard.view(-1)[: flat.numel()])


def exchange_and_add(
    output: Tensor, parts: Tensor, op: str, group: dist.ProcessGroup | None
) -> tuple[Any, Callable[[], None]]:
    """Sends parts to their ranks, which add them in `output`'s dtype."""
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)

    def add_up() -> None:
        first, *others = received
        output.copy_(first.view_as(output))
        for other in others:
            term = other.view_as(output)
            torch.maximum(output, term, out=output) if op == "max" else output.add_(term)

    return work, add_up


def _reduced(parts: Tensor, op: str, rank_group: RankGroup, dtype: torch.dtype) -> Tensor:
    order = rank_group.group_order()
    ordered = order == sorted(order)
    source = parts.contiguous() if ordered else parts[order]
    count_sent(source.nbytes * (1 - 1 / rank_group.size))
    total = torch.empty_like(source[0], dtype=dtype)
    if dtype != source.dtype:
        work, finish = exchange_and_add(total, source, op, rank_group.process_group)
        work.wait()
        finish()
        return total
    work = reduce_scatter_flat(
        total.view(-1),
        source.view(-1),
        _operator(op),
        group=rank_group.process_group,
        async_op=True,
    )
    work.wait()
    return total


def _gathered(part: Tensor, rank_group: RankGroup) -> Tensor:
    found = part.new_empty(rank_group.size, *part.shape)
    count_sent(found.nbytes * (1 - 1 / rank_group.size))
    all_gather_flat(
        found.view(-1), part.view(-1), group=rank_group.process_group, async_op=True
    ).wait()
    order = rank_group.group_order()
    return found if order == sorted(order) else found[torch.tensor(order).argsort()]


def _operator(op: str) -> Any:
    return dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
