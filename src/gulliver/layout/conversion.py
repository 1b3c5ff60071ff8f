"""Plans and runs conversions between DTensor placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from gulliver.comm.collectives import broadcast_object
from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.costs import conversion_seconds
from gulliver.hardware.offload import seconds_text
from gulliver.hardware.probe import current_cluster
from gulliver.layout.moves import MeshTensor, run_move
from gulliver.options import size_text
from gulliver.solve.conversion import Conversion, ConversionStep, Sharding, convert_least

SUMS = ("sum", "avg", "max")


def sharding_of(placements: Sequence[Placement], dims: int) -> Sharding:
    cuts: list[list[int]] = [[] for _ in range(dims)]
    terms: list[int] = []
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            if not -dims <= placement.dim < dims:
                raise GulliverError(
                    f"{placement} on axis {axis} of the mesh shards dim {placement.dim}, but the "
                    f"tensor has {dims} dims"
                )
            cuts[placement.dim % dims].append(axis)
        elif type(placement) is Partial:
            terms.append(axis)
        elif type(placement) is not Replicate:
            raise GulliverError(
                f"{placement} on axis {axis} of the mesh is not supported: use Shard, Replicate or "
                "Partial"
            )
    return Sharding(tuple(map(tuple, cuts)), tuple(terms))


def reduction_of(*layouts: Sequence[Placement]) -> str:
    """Returns the common reduction of all partial values; "sum" if there are none."""
    found = {p.reduce_op for layout in layouts for p in layout if isinstance(p, Partial)}
    if len(found) > 1:
        raise GulliverError(
            f"partial values of {' and '.join(sorted(found))} cannot be converted into each other: "
            "reduce them first"
        )
    (op,) = found or {"sum"}
    if op not in SUMS:
        raise GulliverError(f"Partial({op!r}) is not supported: use one of {', '.join(SUMS)}")
    return op


# Converts DTensors by the cheapest steps, and reports their cost.
#
# y = convert(x, [Replicate(), Shard(0)])                # differentiable
# print(plan_conversion((4096, 4096), 4, (2, 4), [Shard(0), Shard(0)], [Shard(1), Replicate()]))


@dataclass(frozen=True)
class ConversionPlan:
    """The cheapest conversion between two layouts."""

    moves: tuple[ConversionStep, ...]  # Steps in order; empty if the layouts are equal
    seconds: tuple[float, ...]
    item: int  # Bytes of an element
    peak_bytes: int  # Peak bytes of a rank: inputs and outputs of a step
    cluster: str  # Name of the cluster for which seconds are predicted

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def __str__(self) -> str:
        if not self.moves:
            return "the layouts are one: nothing is moved"
        lines = [
            f"{move.kind:<9}{move.axes!s:<9}{text_of(move.before)} -> {text_of(move.after)}  "
            f"{seconds_text(seconds)}"
            for move, seconds in zip(self.moves, self.seconds, strict=True)
        ]
        end = f"{seconds_text(self.total)} on {self.cluster}, {size_text(self.peak_bytes)} at most"
        return "\n".join([*lines, end])


def text_of(layout: Sharding) -> str:
    cuts = ", ".join("".join(map(str, axes)) or "-" for axes in layout.cuts)
    terms = "".join(map(str, layout.terms))
    return f"[{cuts}]" + (f" sum over {terms}" if terms else "")


def plan_conversion(
    shape: Sequence[int],
    item: int,
    mesh: Sequence[int],
    before: Sequence[Placement],
    after: Sequence[Placement],
    cluster: Cluster | None = None,
    room: int | None = None,
) -> ConversionPlan:
    """Finds the cheapest conversion between two layouts, without communication.

    Args:
        shape: size of each dim of the full tensor.
        item: bytes of an element.
        mesh: sizes of the mesh axes, from the slowest links to the fastest.
        before: DTensor placements, one per axis.
        after: target placements.
        cluster: hardware description; None detects that of the running ranks.
        room: maximum bytes of inputs and outputs of a step on a rank; None for no limit.

    Raises:
        GulliverError: layouts do not match the tensor or the mesh, the cluster has the wrong number
            of ranks, or `room` is too small (the error names the minimum).
    """
    for name, layout in (("before", before), ("after", after)):
        if len(layout) != len(mesh):
            raise GulliverError(
                f"{name} has {len(layout)} placements, but the mesh has {len(mesh)} axes"
            )
    op = reduction_of(before, after)
    cluster = cluster or current_cluster(math.prod(mesh))
    if cluster.size != math.prod(mesh):
        raise GulliverError(
            f"the cluster {cluster.name!r} has {cluster.size} ranks, but the mesh has "
            f"{math.prod(mesh)}: pass cluster.resized({math.prod(mesh)})"
        )
    ends = sharding_of(before, len(shape)), sharding_of(after, len(shape))
    links = tuple(
        tuple(cluster.crossed(math.prod(mesh[axis + 1 :]), size)) for axis, size in enumerate(mesh)
    )

    def seconds(move: ConversionStep) -> float:
        if move.kind == "split" and op != "sum" and move.before.cuts != move.after.cuts:
            return math.inf  # zeros next to a part would change a mean or a maximum
        axes = [link for axis in move.axes for link in links[axis]]
        low, high = (item * count for count in move.elements)
        return conversion_seconds(cluster.device, move.kind, axes, low, high)

    def search(most: int | None) -> Conversion | None:
        return convert_least(tuple(shape), tuple(mesh), *ends, seconds, most)

    found = search(None if room is None else room // item)
    if found is None:
        raise GulliverError(
            f"{size_text(room or 0)} of memory is not enough to convert {text_of(ends[0])} to "
            f"{text_of(ends[1])}: {_least_room(search, item)}"
        )
    times = tuple(seconds(move) for move in found.moves)
    return ConversionPlan(found.moves, times, item, item * found.peak, cluster.name)


def _least_room(search: Any, item: int) -> str:
    found = search(None)
    if found is None:
        return "no conversion exists"
    low, high = 0, found.peak
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if search(middle) is not None else (middle + 1, high)
    return f"{size_text(item * low)} would do"


def convert(
    tensor: DTensor,
    placements: Sequence[Placement],
    cluster: Cluster | None = None,
    room: int | None = None,
) -> DTensor:
    """Converts a tensor to other placements at the lowest cost (collective over its mesh)."""
    # The gradient is converted back to the layout of `tensor` (replicated if that is partial), also
    # by the cheapest steps.
    if not isinstance(tensor, DTensor):
        raise GulliverError(f"convert needs a DTensor, not a {type(tensor).__name__}")
    wanted = tuple(placements)
    if tensor.requires_grad and reduction_of(tensor.placements, wanted) != "sum":
        raise GulliverError(
            "only partial sums are differentiable: reduce other partial values first"
        )
    return _Convert.apply(tensor, wanted, cluster, room)  # type: ignore[return-value]


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        placements: tuple[Placement, ...],
        cluster: Cluster | None,
        room: int | None,
    ) -> DTensor:
        ctx.back = tensor.placements, cluster, room
        return _converted(tensor, placements, cluster, room)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        placements, cluster, room = ctx.back
        # Every term of a sum has the sum's gradient.
        wanted = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
        return _converted(grads[0], wanted, cluster, room), None, None, None


def _converted(
    tensor: DTensor, placements: tuple[Placement, ...], cluster: Cluster | None, room: int | None
) -> DTensor:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    dims = tuple(_positive(p, len(shape)) for p in placements)
    local: Any = tensor.to_local()
    local = local.wait() if hasattr(local, "wait") else local  # memory of a pending collective
    place = MeshTensor(mesh, shape, reduction_of(tensor.placements, dims))
    for move in _broadcast_moves(tensor, dims, cluster, room):
        local = run_move(local, move, place)
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        dims,
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _positive(placement: Placement, dims: int) -> Placement:
    if hasattr(placement, "dim") and placement.dim < 0:  # type: ignore[attr-defined]
        return type(placement)(placement.dim % dims)  # type: ignore[attr-defined, call-arg]
    return placement


_found: dict[tuple[Any, ...], tuple[Cluster | None, tuple[ConversionStep, ...]]] = {}
"""Steps by the arguments of the search; keeps the cluster alive, as its id is in the key."""


def _broadcast_moves(
    tensor: DTensor, after: tuple[Placement, ...], cluster: Cluster | None, room: int | None
) -> tuple[ConversionStep, ...]:
    """Broadcasts the first rank's steps, because ranks may have measured links differently."""
    mesh, shape, item = tensor.device_mesh, tuple(tensor.shape), tensor.element_size()
    key = (mesh, shape, item, tensor.placements, after, id(cluster), room)
    if key not in _found:
        sizes = tuple(mesh.shape)
        given = cluster or _here(sizes)
        plan = plan_conversion(shape, item, sizes, tensor.placements, after, given, room)
        moves = plan.moves
        for axis in range(len(sizes)):
            group = mesh.get_group(axis)
            first = int(mesh.mesh[_first_of(mesh, axis)])
            place = dist.get_process_group_ranks(group).index(first)
            moves = broadcast_object(moves, place, group)
        _found[key] = cluster, moves
    return _found[key][1]


def _first_of(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    here = mesh.get_coordinate()
    assert here is not None, "this rank is on the mesh"
    return tuple(0 if number == axis else at for number, at in enumerate(here))


@lru_cache(16)
def _here(sizes: tuple[int, ...]) -> Cluster:
    return current_cluster(math.prod(sizes))
