"""Collectives along the axes of a mesh: the whole over the fast axis, the shard over the slow.

A torus has named axes, the slowest links outermost. A reduce-scatter goes along the innermost axis
first, with everything; along the next goes only the part that was left, and so on. An all-gather
goes the other way round. So a link between nodes carries what is left of the payload when every
rank of the node has taken its share, once for each of them, all at the same time.

[Note: whose part] Ranks are numbered outermost axis first. The rank of number r owns part r of what
is reduced or gathered, as if there were no axes: nobody needs to know how it travelled. The parts
that one step sends to a peer lie apart, so they are laid together once before the first step, or
after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gulliver.comm._exchange import direct_all_gather, direct_reduce_scatter
from gulliver.comm._progress import Arriving, Step
from gulliver.errors import GulliverError


class Torus:
    """Ranks on named axes, outermost first.

    Args:
        axes: name and size of each; their product is the size of the world.
        order: ranks of the world in the order of their places, innermost axis fastest; None for
            0, 1, 2 and so on. With nodes numbered otherwise, list the ranks node by node.
        device_type: of the tensors.

    Raises:
        GulliverError: the sizes do not make the world; the order is none of its ranks.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        order: Sequence[int] | None = None,
        device_type: str = "cpu",
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        sizes = tuple(axes.values())
        if not sizes or min(sizes) < 1 or math.prod(sizes) != world:
            shown = " x ".join(f"{name} {size}" for name, size in axes.items())
            raise GulliverError(
                f"the axes {shown or '()'} do not make {world} ranks: their product must be {world}"
            )
        places = list(range(world)) if order is None else list(order)
        if sorted(places) != list(range(world)):
            raise GulliverError(f"the order {places} must name each of the {world} ranks once")
        self.axes = dict(axes)
        self.sizes = sizes
        self.mesh: DeviceMesh | None = None
        self.groups: tuple[dist.ProcessGroup, ...] = ()
        self.rank, self.size = 0, world
        if world > 1:
            grid = torch.tensor(places).view(sizes)
            self.mesh = DeviceMesh(device_type, grid, mesh_dim_names=tuple(axes))
            self.groups = tuple(self.mesh.get_group(name) for name in axes)
            self.rank = places.index(dist.get_rank())

    def __repr__(self) -> str:
        return "Torus(" + " x ".join(f"{n} {s}" for n, s in self.axes.items()) + ")"


def torus_reduce_scatter(
    output: Tensor, input: Tensor, op: str, torus: Torus, after: Callable[[], Step | None] | None
) -> Step:
    """The steps of a reduce-scatter; see `direct_reduce_scatter` for the arguments."""
    axes = [(g, s) for g, s in zip(torus.groups, torus.sizes, strict=True) if s > 1]
    sizes = [size for _, size in axes]
    part = output.numel()
    inner = "max" if op == "max" else "sum"
    whole = torch.empty(0, dtype=input.dtype)
    if len(axes) > 1:
        whole = torch.empty_like(input)
    # What is left after each step, from the innermost axis outwards; the last is the output.
    counts = [part * math.prod(sizes[:k]) for k in reversed(range(1, len(sizes)))]
    left = [*(torch.empty(count, dtype=output.dtype) for count in counts), output]

    def finished() -> Step | None:
        if op == "mean":
            output.div_(torus.size)
        return after() if after else None

    step: Step | None = None
    sources = [whole if len(axes) > 1 else input, *left[:-1]]
    for (group, _), source, target in reversed(
        list(zip(reversed(axes), sources, left, strict=True))
    ):
        following = finished if step is None else (lambda s=step: s)
        step = direct_reduce_scatter(target, source, inner, group, following)
    assert step is not None
    if len(axes) == 1:
        return step
    first = step

    def post() -> Arriving:
        _lay_together(whole, input, sizes, part)
        return first.post()

    return Step(post, first.finish)


def torus_all_gather(
    output: Tensor, input: Tensor, torus: Torus, after: Callable[[], Step | None] | None
) -> Step:
    """The steps of an all-gather; see `direct_all_gather` for the arguments."""
    axes = [(g, s) for g, s in zip(torus.groups, torus.sizes, strict=True) if s > 1]
    sizes = [size for _, size in axes]
    part = input.numel()
    if len(axes) == 1:
        return direct_all_gather(output, input, axes[0][0], after)
    gathered = [
        torch.empty(part * math.prod(sizes[: k + 1]), dtype=input.dtype) for k in range(len(sizes))
    ]

    def finished() -> Step | None:
        _lay_apart(output, gathered[-1], sizes, part)
        return after() if after else None

    step: Step | None = None
    sources = [input, *gathered[:-1]]
    for (group, _), source, target in reversed(list(zip(axes, sources, gathered, strict=True))):
        following = finished if step is None else (lambda s=step: s)
        step = direct_all_gather(target, source, group, following)
    assert step is not None
    return step


def _lay_together(whole: Tensor, input: Tensor, sizes: list[int], part: int) -> None:
    """Outermost axis first becomes innermost axis first."""
    backwards = [*reversed(range(len(sizes))), len(sizes)]
    whole.view(*reversed(sizes), part).copy_(input.view(*sizes, part).permute(backwards))


def _lay_apart(output: Tensor, gathered: Tensor, sizes: list[int], part: int) -> None:
    backwards = [*reversed(range(len(sizes))), len(sizes)]
    output.view(*sizes, part).copy_(gathered.view(*reversed(sizes), part).permute(backwards))
