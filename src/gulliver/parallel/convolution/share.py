"""Predicts how long the ranks need when each dim is cut, to choose among them.

The network runs once for each dim on tensors without values, as the busiest rank would: the first,
whose part is never smaller than another's. What it would compute, move and send is counted
and priced by the cluster's rates (`gulliver.hardware`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from gulliver._compat import DispatchMode
from gulliver.comm.collectives import all_reduce, broadcast_object, gather_objects
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError, nearest, once_differentiable
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.costs import memory_seconds, point_to_point_seconds
from gulliver.hardware.probe import current_cluster
from gulliver.parallel.convolution.networks import networks_of, without_masks
from gulliver.parallel.convolution.ranks import Imagined, Ranks
from gulliver.parallel.convolution.sharded import Sharded, ShardedDim, like, own_of


@dataclass(frozen=True)
class SharingPrediction:
    """The predicted cost of a forward with one dim cut."""

    dim: str  # Dim that is cut
    seconds: float  # Predicted seconds of the busiest rank
    sent: int  # Bytes that it sends
    exchanges: int
    operations: int  # Number of its floating-point operations

    def __str__(self) -> str:
        return (
            f"{self.dim}: {self.seconds * 1e3:.3g} ms, {self.sent / 2**20:.3g} MiB sent in "
            f"{self.exchanges} exchanges, {self.operations / 1e9:.3g} GFLOP"
        )


def predict(
    network: nn.Module, x: Tensor, dims: dict[str, int], ranks: int, cluster: Cluster
) -> list[SharingPrediction]:
    """Predicts a forward for every dim that can be cut, the fastest first."""
    found, refused = [], None
    for name, dim in dims.items():
        if -dim > x.dim() or dim >= x.dim() or (name == "time" and x.dim() < 5):
            continue
        try:
            found.append(_predicted(network, x, name, dim, ranks, cluster))
        except GulliverError as error:
            refused = refused or error
    if not found:
        raise refused or GulliverError(f"an input of shape {tuple(x.shape)} has no dim to cut")
    return sorted(found, key=lambda predicted: predicted.seconds)


def _predicted(
    network: nn.Module, x: Tensor, name: str, dim: int, ranks: int, cluster: Cluster
) -> SharingPrediction:
    holder = Imagined(0, ranks)
    counter, moved = FlopCounterMode(display=False), _Moved()
    given: Tensor = holder.shard(torch.empty(x.shape, dtype=x.dtype, device="meta"), dim)
    if name == "samples":
        # Whole clips need nothing of each other: the network runs on them plainly.
        given = torch.empty(-(-len(x) // ranks), *x.shape[1:], dtype=x.dtype, device="meta")
    state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    empty = {key: torch.empty_like(value, device="meta") for key, value in state.items()}
    with torch.no_grad(), _plain(network), without_masks(network), moved, counter:
        functional_call(network, empty, (given,))
    device, operations = cluster.device, counter.get_total_flops()
    dtype = str(x.dtype).removeprefix("torch.")
    rate = device.matmul.get(dtype) or max(device.matmul.values())
    seconds = operations / rate + memory_seconds(device, moved.nbytes)
    if ranks > 1 and cluster.axes:
        link = cluster.axes[0].link
        each = holder.sent / max(1, holder.calls)
        seconds += holder.calls * point_to_point_seconds(link, int(each))
    return SharingPrediction(name, seconds, holder.sent, holder.calls, operations)


@contextmanager
def _plain(network: Any) -> Iterator[None]:
    """Restores a network's own forward inside the block."""
    replaced = vars(network).pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            network.forward = replaced


class _Moved(DispatchMode):
    """Counts the bytes that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.nbytes += made.nbytes
        return made


# Distributes whole clips over ranks, for networks that treat them independently.
#
# A network that is handed whole clips runs on plain tensors, so nothing refuses a function that
# mixes them. Layers that do are found by their types, and all else by trying: the result for a
# clip next to another must be its result alone.


BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference by dtype, relative to the largest value; that of 16 bits is `COARSE`."""

COARSE, ON_DEVICE = 3e-2, 3e-3
"""Tolerances of 16 bits, and of float32 on a device: convolutions may round products (TF32)."""


def own_samples(plain: Any, x: Sharded, rest: tuple[Any, ...]) -> Any:
    """Runs a network on this rank's clips alone."""
    held = len(x.local)
    # A rank without work computes a clip of zeros, as long as another computes one: it knows what
    # comes out then, and has a part in backward.
    own = x.local if held else x.local.new_zeros(1, *x.shape[1:]) + x.local.sum()
    made = plain(own, *rest)
    if not isinstance(made, Tensor):
        return made
    return like(x, made if held else made[:0])


def refuse_mixing_layers(network: nn.Module, name: str) -> None:
    """Refuses layers that mix clips, or draw different random numbers on every rank."""
    for where, part in network.named_modules():
        if isinstance(part, BATCH_NORMS) and (part.training or part.running_mean is None):
            raise GulliverError(
                f"batch norm {where!r} of the {name} counts statistics of all clips, so they "
                "cannot be dealt to ranks: call eval(), or use group norms"
            )
        if isinstance(part, DROPOUTS) and part.training and part.p:
            raise GulliverError(
                f"dropout {where!r} of the {name}: every rank would draw others; call eval(), or "
                "set it to 0"
            )


def verify_independent(
    network: nn.Module, plain: Any, name: str, given: tuple[Any, ...], group: RankGroup
) -> None:
    """Checks by running it that a network treats clips independently; all ranks call it."""
    try:
        wrong = _depends(network, plain, *given)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    for found in gather_objects(wrong, group.process_group):
        if found:
            raise GulliverError(
                f"clips of the {name} cannot be dealt to ranks ({found}): what comes of a clip "
                "must be the same beside any other; cut height, width or time instead"
            )


class _Called(nn.Module):
    """A network's own forward, without hooks or replacements."""

    def __init__(self, network: nn.Module, plain: Any) -> None:
        super().__init__()
        self.network, self.plain = network, plain

    def forward(self, *given: Any) -> Any:
        return self.plain(*given)


@torch.no_grad()
def _depends(network: nn.Module, plain: Any, x: Tensor, *rest: Any) -> str:
    """Describes how the result of a clip depends on another; empty if it does not."""

    def call(clips: Tensor) -> Any:
        # Buffers of its own: trying leaves no trace.
        buffers = {f"network.{key}": value.clone() for key, value in network.named_buffers()}
        return functional_call(_Called(network, plain), buffers, (clips.clone(), *rest))

    one = x[:1]
    # Not the next clip, which may be the same: one that nothing makes equal to the first.
    other = torch.arange(one.numel(), dtype=torch.float64, device=x.device).mul(0.7).sin()
    other = (other.view_as(one) * one.abs().amax().clamp(min=1)).to(x.dtype)
    both = call(torch.cat([one, other]))
    if not isinstance(both, Tensor):
        return ""  # refused for what it is
    if not both.dim() or len(both) != 2:
        return f"of two clips it makes a tensor {tuple(both.shape)}"
    allowed = _tolerance(x, both, *network.parameters())
    for at, clip in enumerate((one, other)):
        alone = call(clip)[0].nan_to_num()
        apart = (
            (both[at].nan_to_num() - alone).abs().amax() if alone.numel() else alone.new_zeros(())
        )
        if apart > allowed * alone.abs().amax():
            return f"beside another clip, values differ by up to {float(apart):.2g}"
    return ""


def _tolerance(*tensors: Tensor) -> float:
    x = tensors[0]
    if torch.is_autocast_enabled(x.device.type):
        return COARSE
    found = max(TOLERANCES.get(t.dtype, COARSE) for t in tensors if t.is_floating_point())
    return max(found, ON_DEVICE) if x.is_cuda and found > TOLERANCES[torch.float64] else found


# Shares an autoencoder between ranks: one line, forward and backward, exactly.
#
#     shared = share_autoencoder(autoencoder, mesh["vae"])       # dim="auto": the predicted fastest
#     video = autoencoder.decode(latents)                        # all ranks call, and get the whole
#     loss(video).backward()
#     shared.sum_gradients()                                     # each rank had its share of them
#     shared.off()
#
# `height`, `width` and `time` cut activations into runs of rows, columns or frames: convolutions
# fetch the border of their neighbours' parts, norms merge statistics, attention gathers keys and
# values. `samples` deals whole clips to the ranks: where there are enough of them, that sends
# least. A network that mixes clips is refused.
#
# All ranks call the networks with the same input. What comes out is gathered, so all have the
# whole; its gradient is taken to be the same on all ranks, and each passes its own part back. The
# gradient of the input is gathered, too: what is shared may follow what is shared, cut along
# another dim. Gradients of parameters are shares, to be added up over the ranks: `sum_gradients`
# does that.


DIMS: dict[str, int] = {"samples": 0, "height": -2, "width": -1, "time": -3}
"""Dims of the networks' inputs; of ``[batch, channels, frames, height, width]``."""


@dataclass
class SharedNetworks:
    """Networks that the ranks of a group run together; `off` restores them."""

    rank_group: RankGroup
    dim: str  # Dim that is cut, or "auto"
    cluster: Cluster | None = None  # Cluster to predict for; None for the one that was probed
    show: Callable[[str], None] | None = None  # Called with a description of every choice
    # Dim that was chosen for each network and shape.
    chosen: dict[Any, str] = field(default_factory=dict)
    # Predictions that each choice was made from.
    predictions: dict[Any, list[SharingPrediction]] = field(default_factory=dict)
    _networks: list[Any] = field(default_factory=list)
    _independent: set[str] = field(default_factory=set)

    def add(self, network: nn.Module, dims: dict[str, int], name: str) -> None:
        """Makes the ranks run a network together."""
        plain = network.forward
        network.forward = partial(self._forward, network, plain, dims, name)
        self._networks.append(network)

    def off(self) -> None:
        """Makes every rank run the networks alone again."""
        for network in self._networks:
            vars(network).pop("forward", None)
        self._networks = []

    def sum_gradients(self) -> None:
        """Adds up the ranks' gradients of the networks' parameters; all ranks call it."""
        if self.rank_group.size == 1:
            return
        # Each once: two networks may be halves of the same modules.
        for parameter in nn.ModuleList(self._networks).parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce(parameter.grad, group=self.rank_group.process_group)

    def explain(self) -> str:
        """Describes what was cut, and the predictions behind it."""
        lines = []
        for key, dim in self.chosen.items():
            lines.append(f"{key[0]} of {'x'.join(map(str, key[1]))}: {dim}")
            lines += [f"  {predicted}" for predicted in self.predictions.get(key, [])]
        return "\n".join(lines or ["nothing was run yet"])

    def _forward(
        self, network: nn.Module, plain: Any, dims: dict[str, int], name: str, x: Tensor, *rest: Any
    ) -> Tensor:
        if isinstance(x, Sharded) or any(isinstance(value, Tensor) for value in rest):
            raise GulliverError(f"a shared {name} takes one tensor, whole on all ranks")
        dim = self._choose(network, plain, dims, name, x, rest)
        if dim == "samples":
            self._check_samples(network, plain, name, x, rest)
        ranks = Ranks(self.rank_group)
        part = given(x, dims[dim], ranks)
        with without_masks(network):
            made = own_samples(plain, part, rest) if dim == "samples" else plain(part, *rest)
        if not isinstance(made, Sharded):
            raise GulliverError(
                f"a shared {name} must return one tensor, not {type(made).__name__}"
            )
        return gathered(made)

    def _describe(self, key: tuple[str, tuple[int, ...]]) -> str:
        name, shape = key
        size, dim = "x".join(map(str, shape)), self.chosen[key]
        what = (
            f"{self.rank_group.size} ranks run the autoencoder's {name} together, each with a part "
            f"of the {dim} of {size}"
        )
        found = self.predictions.get(key, [])
        if not found:
            return f"{what}, as asked for"
        times = ", ".join(f"{one.dim} {one.seconds * 1e3:.3g} ms" for one in found)
        return f"{what}, predicted to be the fastest ({times})"

    def _choose(
        self,
        network: nn.Module,
        plain: Any,
        dims: dict[str, int],
        name: str,
        x: Tensor,
        rest: tuple[Any, ...],
    ) -> str:
        key = name, tuple(x.shape)
        if key not in self.chosen:
            self.chosen[key] = self.dim
            if self.dim == "auto":
                cluster = self.cluster or current_cluster(self.rank_group.size)
                found = predict(network, x, dims, self.rank_group.size, cluster)
                # The ranks may have probed other links.
                found = broadcast_object(found, 0, self.rank_group.process_group)
                if found[0].dim == "samples" and len(found) > 1:
                    try:
                        self._check_samples(network, plain, name, x, rest)
                    except GulliverError:
                        found = found[1:]
                self.predictions[key], self.chosen[key] = found, found[0].dim
            if self.show is not None:
                self.show(self._describe(key))
        return self.chosen[key]

    def _check_samples(
        self, network: nn.Module, plain: Any, name: str, x: Tensor, rest: tuple[Any, ...]
    ) -> None:
        """Refuses to deal the clips of a network that mixes them."""
        refuse_mixing_layers(network, name)
        if len(x) and name not in self._independent:
            with without_masks(network):
                verify_independent(network, plain, name, (x, *rest), self.rank_group)
            self._independent.add(name)


def share_autoencoder(
    autoencoder: nn.Module,
    mesh: DeviceMesh | RankGroup | None = None,
    dim: str = "auto",
    cluster: Cluster | None = None,
    show: Callable[[str], None] | None = None,
) -> SharedNetworks:
    """Makes the ranks of a group encode and decode together, in place; all of them call it.

    Args:
        autoencoder: module with `networks`, or with `encoder` and `decoder`, such as ours and
            diffusers'; or any other module made of convolutions, norms, resampling and attention,
            which is then shared as a whole.
        mesh: mesh of one dim, or rank group; None is the whole world.
        dim: "samples", "height", "width", "time" or "auto" for the predicted fastest.
        cluster: cluster to predict for; None for the one that was probed.
        show: function called with a description of every choice and its reason.

    Raises:
        GulliverError: an unknown dim, a mesh of several dims, or an autoencoder shared already.
    """
    if dim not in ("auto", *DIMS):
        raise GulliverError(f"dim={dim!r}: {nearest(dim, ('auto', *DIMS))}")
    shared = SharedNetworks(_rank_group(mesh), dim, cluster, show)
    own = DIMS | getattr(autoencoder, "input_dims", {})
    networks = networks_of(autoencoder)
    if any("forward" in vars(part) for part in networks.values()):
        raise GulliverError("this autoencoder is shared already: call off() of that first")
    if shared.rank_group.size > 1:
        for name, part in networks.items():
            shared.add(part, own, name)
    return shared


def given(x: Tensor, dim: int, ranks: Ranks) -> Sharded:
    """Returns this rank's part of what all ranks have; its gradient becomes whole on all ranks."""
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
    """Returns the whole on all ranks; of its gradient each takes its own part."""
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
            f"a mesh of {mesh.ndim} dims does not say which ranks share the autoencoder: give one "
            "of its dims, as in mesh['vae']"
        )
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return RankGroup(tuple(ranks), ranks.index(dist.get_rank()), group)
