"""Shares an autoencoder between ranks, exactly in forward and backward.

    shared = share_autoencoder(autoencoder, mesh["vae"])
    video = autoencoder.decode(latents)                        # all ranks call, all get the result
    loss(video).backward()
    shared.sum_gradients()                                     # each rank has a partial sum
    shared.off()

`samples` distributes full clips over the ranks. `height`, `width` and `time` give each rank
consecutive rows, columns or frames: convolutions fetch the halo from their neighbors, norms merge
statistics, attention gathers keys and values.

All ranks call the networks with the same input. The output is gathered on all ranks; its gradient
is assumed equal on all ranks, and each propagates its own part. The input's gradient is gathered
too, so sharded networks can be chained, each along its own dim. Gradients of
parameters are partial sums, which `sum_gradients` adds up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError, nearest, once_differentiable
from gulliver.parallel.convolution.networks import networks_of, without_masks
from gulliver.parallel.convolution.ranks import Ranks
from gulliver.parallel.convolution.sharded import Sharded, ShardedDim, own_of

DIMS: dict[str, int] = {"samples": 0, "height": -2, "width": -1, "time": -3}
"""Dims of the networks' inputs ``[batch, channels, frames, height, width]``."""


@dataclass
class SharedNetworks:
    """Networks that are sharded over a process group; `off` restores them."""

    rank_group: RankGroup
    dim: str  # Dim to shard, or "auto"
    show: Callable[[str], None] | None = None  # Called with a description of every choice
    # Dim that was chosen for each network and shape.
    chosen: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    _networks: list[Any] = field(default_factory=list)

    def add(self, network: nn.Module, dims: dict[str, int], name: str) -> None:
        plain = network.forward
        network.forward = partial(self._forward, network, plain, dims, name)
        self._networks.append(network)

    def off(self) -> None:
        for network in self._networks:
            vars(network).pop("forward", None)
        self._networks = []

    def sum_gradients(self) -> None:
        """Sums the gradients of the networks' parameters over the ranks (collective)."""
        if self.rank_group.size == 1:
            return
        # Each parameter once, because two networks may share modules.
        for parameter in nn.ModuleList(self._networks).parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce(parameter.grad, group=self.rank_group.process_group)

    def explain(self) -> str:
        """Describes how inputs were sharded."""
        lines = [self._describe(name, shape) for name, shape in self.chosen]
        return "\n".join(lines or ["nothing was run yet"])

    def _forward(
        self, network: nn.Module, plain: Any, dims: dict[str, int], name: str, x: Tensor, *rest: Any
    ) -> Tensor:
        if isinstance(x, Sharded) or any(isinstance(value, Tensor) for value in rest):
            raise GulliverError(
                f"a shared {name} needs a single input tensor, which must be equal on all ranks"
            )
        part = given(x, dims[self._choose(name, x)], Ranks(self.rank_group))
        with without_masks(network):
            made = plain(part, *rest)
        if not isinstance(made, Sharded):
            raise GulliverError(
                f"a shared {name} must return one tensor, not {type(made).__name__}"
            )
        return gathered(made)

    def _choose(self, name: str, x: Tensor) -> str:
        """Returns the dim to shard; "auto" minimizes communication."""
        key = name, tuple(x.shape)
        if key not in self.chosen:
            dim = self.dim
            if dim == "auto" and len(x) >= self.rank_group.size:
                dim = "samples"  # full clips only send the result
            if dim == "auto" or (dim == "samples" and len(x) == 1):
                # A halo consists of full rows or columns, so the longer side is sharded. There are
                # few frames, and a frame is the largest halo.
                dim = "height" if x.shape[-2] >= x.shape[-1] else "width"
            self.chosen[key] = dim
            if self.show is not None:
                self.show(self._describe(*key))
        return self.chosen[key]

    def _describe(self, name: str, shape: tuple[int, ...]) -> str:
        return (
            f"{self.rank_group.size} ranks run the autoencoder's {name} together, each with a part "
            f"of the {self.chosen[name, shape]} of {'x'.join(map(str, shape))}"
        )


def share_autoencoder(
    autoencoder: nn.Module,
    mesh: DeviceMesh | RankGroup | None = None,
    dim: str = "auto",
    show: Callable[[str], None] | None = None,
) -> SharedNetworks:
    """Shards an autoencoder over a group of ranks, in place (collective).

    Args:
        autoencoder: Gulliver or diffusers autoencoder, a module with `networks` or with `encoder`
            and `decoder`; any other module made of convolutions, norms, resampling and attention is
            sharded as one network.
        mesh: one-dimensional mesh, or rank group; None for all ranks.
        dim: "samples", "height", "width", "time"; or "auto": samples if there are at least as many
            as ranks, otherwise the longer of height and width.
        show: called with a description of each choice.

    Raises:
        GulliverError: the dim is unknown, the mesh has several dims, or the autoencoder is already
            sharded.
    """
    if dim not in ("auto", *DIMS):
        raise GulliverError(f"unknown dim={dim!r}: {nearest(dim, ('auto', *DIMS))}")
    shared = SharedNetworks(_rank_group(mesh), dim, show)
    own = DIMS | getattr(autoencoder, "input_dims", {})
    networks = networks_of(autoencoder)
    if any("forward" in vars(part) for part in networks.values()):
        raise GulliverError(
            "this autoencoder is already shared; first call off() of its SharedNetworks"
        )
    if shared.rank_group.size > 1:
        for name, part in networks.items():
            shared.add(part, own, name)
    return shared


def given(x: Tensor, dim: int, ranks: Ranks) -> Sharded:
    part = ranks.shard(x, dim)
    if torch.is_grad_enabled() and x.requires_grad:
        part.local = _Given.apply(x, part.cut, ranks)
    return part


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: ShardedDim, ranks: Ranks) -> Tensor:
        ctx.how = cut, ranks
        return own_of(whole, cut, ranks)

    @staticmethod
    @once_differentiable("a convolution that is shared by ranks")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        cut, ranks = ctx.how
        return ranks.whole(Sharded(grad, cut, ranks), ("given", 0)), None, None


def gathered(x: Sharded) -> Tensor:
    return _Gathered.apply(x.local, x)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, x: Sharded) -> Tensor:
        ctx.how = x.cut, x.holder
        with torch.no_grad():
            return x.holder.whole(Sharded(local, x.cut, x.holder), ("gather", 0))

    @staticmethod
    @once_differentiable("a convolution that is shared by ranks")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        cut, holder = ctx.how
        return own_of(grad, cut, holder), None


def _rank_group(mesh: DeviceMesh | RankGroup | None) -> RankGroup:
    if isinstance(mesh, RankGroup):
        return mesh
    if not dist.is_initialized():
        return ALONE
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise GulliverError(
            f"a mesh of {mesh.ndim} dims is ambiguous: pass one of its dims, as in mesh['vae']"
        )
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return RankGroup(tuple(ranks), ranks.index(dist.get_rank()), group)
