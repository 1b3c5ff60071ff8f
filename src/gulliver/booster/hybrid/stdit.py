"""Sequence parallelism of STDiT: which dim of a clip's tokens is sharded, and how attention runs.

Tokens [B, T, S, C] are sharded along the spatial dim S or the temporal dim T. Attention along the
other dim is local; attention along the sharded dim runs

- by *swap*: local attention with the other dim sharded instead, an all-to-all before it and one
  after it (Zhao et al., DSP: Dynamic Sequence Parallelism, 2024). With M bytes of tokens on a rank
  it sends about 2 M (N - 1) / N; an exchange of heads sends 4 M (N - 1) / N. With fewer frames than
  ranks, some ranks idle
- by *heads*: an all-to-all exchanges tokens for heads of q, k, v and the output (Ulysses), or
- by *ring*: keys and values circulate.

`choose_scheme` adds up the cost of a spatial and a temporal block, forward and backward, on the
rank with the most work. All ranks choose the same scheme because they use the same costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.booster.hybrid.mesh import Degree, put_degree
from gulliver.comm.collectives import all_reduce, broadcast
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError, nearest, once_differentiable
from gulliver.hardware.attention import AttentionShape as Shape
from gulliver.hardware.attention import attention_seconds
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.costs import all_to_all_seconds, linear_seconds, resharding_bytes
from gulliver.hardware.probe import current_cluster
from gulliver.models.blocks import (
    CaptionEmbedder,
    ConditionFrames,
    FinalLayer,
    Grid,
    Mix,
    STDiTBlock,
)
from gulliver.models.stdit import STDiT3
from gulliver.parallel.sequence.attend import attention
from gulliver.parallel.sequence.choice import predict, volume
from gulliver.parallel.sequence.layout import SequenceGroups, SequencePlan
from gulliver.parallel.sequence.sharding import shard, swap_sharded_dim, unshard

By = Literal["swap", "heads", "ring"]
# How attention can run along the sharded dim, by sequence_parallelism_mode.
WAYS: dict[str, tuple[By, ...]] = {"all_to_all": ("swap", "heads"), "ring_attn": ("ring",)}
# Dims of the tokens [B, T, S, C].
FRAMES, PLACES = 1, 2


@dataclass(frozen=True)
class Scheme:
    """A way to shard a clip over ranks."""

    # Sharded dim of the tokens, `FRAMES` or `PLACES`.
    cut: int
    # How attention along that dim runs.
    by: By

    def __str__(self) -> str:
        return f"{'frames' if self.cut == FRAMES else 'places'} cut, by {self.by}"


# All schemes by name.
SCHEMES = {
    f"{n}-{by}": Scheme(d, by)
    for n, d in (("places", PLACES), ("frames", FRAMES))
    for by in ("swap", "heads", "ring")
}


@dataclass(frozen=True)
class Width:
    """Model dimensions that determine the cost of a clip, on one tensor rank."""

    channels: int
    # Number of heads on this rank.
    heads: int
    # Head dim.
    head_dim: int
    # This rank's hidden units of an MLP.
    hidden: int
    # Number of pairs of blocks.
    depth: int
    # Dtype of the parameters, as torch calls it.
    dtype: str = "float32"


@dataclass(frozen=True)
class Clip:
    """Token dimensions of a call."""

    # Clips in the batch, B.
    batch: int
    # Tokens along the temporal dim, T.
    frames: int
    # Tokens along the spatial dim, S.
    places: int

    def size(self, dim: int) -> int:
        """Number of tokens along the temporal dim (`FRAMES`) or the spatial one (`PLACES`)."""
        return self.frames if dim == FRAMES else self.places

    def attention(self, dim: int, width: Width) -> Shape:
        rows = self.batch * self.size(FRAMES + PLACES - dim)
        heads = width.heads, width.heads
        return Shape(rows, *heads, self.size(dim), width.head_dim, dtype=width.dtype)


@dataclass(frozen=True)
class PredictedScheme:
    """A scheme with its predicted cost: one forward and backward of all blocks."""

    scheme: Scheme
    # Seconds of the rank with the most work.
    seconds: float
    # Bytes sent per rank, on average.
    sent: float


@dataclass(frozen=True)
class ChosenScheme:
    """The scheme with the lowest predicted time, and the alternatives."""

    # The chosen scheme.
    scheme: Scheme
    # The clip that it was chosen for.
    clip: Clip
    degree: int
    # All schemes considered, best first.
    predicted: tuple[PredictedScheme, ...]

    def __str__(self) -> str:
        c = self.clip
        head = f"{c.batch} x {c.frames} frames x {c.places} places on {self.degree} ranks"
        rows = [
            f"  {p.scheme!s:<22} {p.seconds * 1e3:10.3f} ms {p.sent / 1e6:10.3f} MB sent"
            for p in self.predicted
        ]
        return "\n".join([f"{head}: {self.scheme}; of a forward and a backward:", *rows])


def choose_scheme(
    clip: Clip,
    width: Width,
    plan: SequencePlan,
    mode: str,
    cluster: Cluster,
    fixed: str | None = None,
) -> ChosenScheme:
    """Predicts the cost of every scheme of a mode and chooses the fastest."""
    if mode not in WAYS:
        raise GulliverError(
            f"an STDiT only supports {' or '.join(map(repr, WAYS))}, not {mode!r}, because modes "
            "that shard sequences over the tensor axis need tensor parallelism"
        )
    ways = _ways(width, plan, mode)
    names = [f"{name}-{by}" for name in ("places", "frames") for by in ways]
    if fixed is not None:
        if fixed not in names:
            raise GulliverError(f"{mode} has no scheme {fixed!r}: {nearest(fixed, names)}")
        names = [fixed]
    found = [_predict(SCHEMES[name], clip, width, plan, cluster) for name in names]
    found.sort(key=lambda p: (p.seconds, p.sent))
    return ChosenScheme(found[0].scheme, clip, plan.degree, tuple(found))


def _ways(width: Width, plan: SequencePlan, mode: str) -> list[By]:
    """Returns the communication patterns of a mode for which there are enough heads."""
    ways: list[By] = [by for by in WAYS[mode] if by == "swap" or plan.ulysses <= width.heads]
    if not ways:
        raise GulliverError(
            f"{plan} exchanges heads between more ranks than the {width.heads} heads that each "
            "tensor rank has: use a larger ring instead"
        )
    return ways


def _predict(
    scheme: Scheme, clip: Clip, width: Width, plan: SequencePlan, cluster: Cluster
) -> PredictedScheme:
    costs = _Costs(clip, width, plan, cluster)
    cut, other = scheme.cut, FRAMES + PLACES - scheme.cut
    # Attention along the unsharded dim first, then along the sharded one.
    seconds = costs.linears(cut) + costs.own(cut) + costs.attention(cut, other)
    if scheme.by == "swap":
        seconds += costs.own(other) + costs.attention(other, cut) + 4 * costs.swap()
        sent = 4 * costs.swap_bytes()
    else:
        shape = clip.attention(cut, width)
        timed = replace(shape, dtype=costs.dtype)
        seconds += costs.own(cut) + predict(cluster, timed, plan).seconds
        of_one = volume(plan, shape)
        sent = of_one.forward + of_one.backward
    return PredictedScheme(scheme, width.depth * seconds, width.depth * sent)


class _Costs:
    """Seconds of one pair of blocks on the slowest rank, forward and backward."""

    def __init__(self, clip: Clip, width: Width, plan: SequencePlan, cluster: Cluster) -> None:
        self.clip, self.width, self.plan, self.cluster = clip, width, plan, cluster
        known = cluster.device.matmul
        self.dtype = width.dtype if width.dtype in known else "float32"

    def linears(self, cut: int) -> float:
        """Seconds of both blocks, excluding self-attention."""
        w = self.width
        inner = w.heads * w.head_dim
        return 2 * self._linear(self._tokens(cut), w.channels, 2 * inner + 2 * w.hidden)

    def own(self, cut: int) -> float:
        """Seconds of the projections of one self-attention."""
        w = self.width
        return self._linear(self._tokens(cut), w.channels, 4 * w.heads * w.head_dim)

    def attention(self, cut: int, along: int) -> float:
        """Seconds of attention over a rank's full rows while another dim is sharded."""
        rows = self.clip.batch * self._most(cut) * self.width.heads
        tokens, dims = self.clip.size(along), (self.width.head_dim, self.width.head_dim)
        device = self.cluster.device
        return attention_seconds(device, rows, tokens, tokens, dims, self.dtype, backward=True)

    def swap_bytes(self) -> float:
        """Mean bytes that a rank sends in one swap."""
        frames, places = self.plan.lay(self.clip.frames), self.plan.lay(self.clip.places)
        token = self.clip.batch * self.width.channels * self.clip.attention(PLACES, self.width).item
        return resharding_bytes(frames.sizes(), places.sizes(), token)

    def swap(self) -> float:
        degree = self.plan.degree
        links = self.cluster.resized(degree).links()
        return all_to_all_seconds(links, int(self.swap_bytes() * degree / max(1, degree - 1)))

    def _linear(self, tokens: int, inputs: int, outputs: int) -> float:
        device = self.cluster.device
        return linear_seconds(device, tokens, inputs, outputs, self.dtype, backward=True)

    def _tokens(self, cut: int) -> int:
        whole = self.clip.size(FRAMES + PLACES - cut)
        return self.clip.batch * self._most(cut) * whole

    def _most(self, cut: int) -> int:
        return max(self.plan.lay(self.clip.size(cut)).sizes())


# One clip of an STDiT on several ranks.
#
#     wire_stdit(model, make_groups(SequencePlan(ulysses=4)), "all_to_all")
#     out = model(x, timestep, y, ...)    # full x and out on every rank
#
# Between the patch embedding and the final projection, each rank processes part of the tokens. The
# first block shards them, the final layer gathers the patches, and attention along the sharded dim
# runs as `choose_scheme` chooses for the clip's shape. Each token attends to the caption, which all
# ranks have, locally. Read `wire_stdit`, `ShardedBlock`, `ShardedFinalLayer`.


Show = Callable[[str], None]
Found = TypeVar("Found", bound=nn.Module)


# [Note: inputs] Gradients of parameters, in the blocks and before them, come from a rank's own
# tokens only, and are right after the optimizer's mean over the ranks of a clip (see
# `parallel/sequence/sharding.py`, [Note: gradients]). Inputs that require gradients are not seen by
# the optimizer, so they get this mean on entry.
#
# This module knows nothing of pipelines, tensor parallelism (a rank may have fewer heads than the
# model) and ZeRO. Nothing is kept between calls, so shapes may change, and a block may be
# recomputed in backward.
def wire_stdit(
    model: nn.Module,
    groups: SequenceGroups,
    mode: str,
    tensor: RankGroup = ALONE,
    *,
    scheme: str | None = None,
    cluster: Cluster | None = None,
    show: Show | None = None,
) -> None:
    """Makes an STDiT shard each clip over the ranks of a sequence, in place."""
    # Parameters do not change. All ranks of a sequence must call the model with the same inputs,
    # and get the same output; gradients of parameters are right after averaging over these ranks.
    if not isinstance(model, STDiT3):
        raise GulliverError(f"only an STDiT3 can shard clips, not {type(model).__name__}")
    if model.window is not None or model.x_embedder_cond is not None:
        raise GulliverError(
            "an STDiT3 with kernel_size or image_conditioning cannot shard clips over ranks: use "
            "tp_size or pp_size instead"
        )
    if any(isinstance(m, ShardedBlock | ShardedFinalLayer) for m in model.modules()):
        raise GulliverError("this STDiT3 already shards sequences: build a new one")
    width = _width(model, tensor)
    if cluster is None:
        cluster = current_cluster(dist.get_world_size() if dist.is_initialized() else 1)
    degree = Degree(groups)
    adapter = ClipAdapter(degree, tensor, (width, mode, cluster, scheme), show)
    # Computed for one shape now, so that impossible modes are rejected before anything runs.
    _ = adapter.chosen(Clip(1, groups.plan.degree, groups.plan.degree))
    put_degree(model, degree)
    if groups.all.size * tensor.size > 1:
        for embedder in _of_kind(model.y_embedder, CaptionEmbedder):
            embedder.register_forward_pre_hook(adapter.draw_caption_drops)
    if groups.all.size == 1:
        return
    model.register_forward_pre_hook(adapter.enter, with_kwargs=True)
    model.register_forward_hook(adapter.leave, always_call=True)
    first = _of_kind(model.spatial_blocks[0], STDiTBlock)
    for block in _of_kind(model, STDiTBlock):
        block.__class__ = _both(ShardedBlock, type(block))
        assert isinstance(block, ShardedBlock)
        block.adapter, block.cuts = adapter, block in first
    for layer in _of_kind(model.final_layer, FinalLayer):
        layer.__class__ = _both(ShardedFinalLayer, type(layer))
        assert isinstance(layer, ShardedFinalLayer)
        layer.adapter = adapter


class ClipAdapter:
    """State shared by the blocks of a model that shards clips, and by copies of the model."""

    def __init__(
        self,
        degree: Degree,
        tensor: RankGroup,
        choice: tuple[Width, str, Cluster, str | None],
        show: Show | None,
    ) -> None:
        self.degree, self.tensor = degree, tensor
        self._choice = choice
        self._show = show
        self._chosen: dict[tuple[int, Clip], ChosenScheme] = {}
        # Groups of the forward in flight.
        self._opened: SequenceGroups | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Process groups cannot be copied, and need not be.
        return self

    @property
    def groups(self) -> SequenceGroups:
        """Ranks that share the clip of the current forward."""
        if self._opened is None and self.degree.lasting:
            return self.degree.now
        if self._opened is None and self.degree.varied:
            raise GulliverError(
                "a block ran outside its model's forward after forwards with different degrees; "
                "omit activation checkpointing or sequence_degree"
            )
        return self._opened or self.degree.planned

    def chosen(self, clip: Clip) -> ChosenScheme:
        width, mode, cluster, fixed = self._choice
        return choose_scheme(clip, width, self.groups.plan, mode, cluster, fixed)

    def scheme(self, x: Tensor, grid: Grid) -> Scheme:
        """Returns the scheme for the shape of `x`, which does not change during a forward."""
        clip = Clip(len(x), grid.frames, grid.spatial)
        key = self.groups.plan.degree, clip
        if key not in self._chosen:
            self._chosen[key] = self.chosen(clip)
            if self._show is not None and self.degree.planned.rank == 0:
                self._show(str(self._chosen[key]))
        return self._chosen[key].scheme

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's shard of a replicated tensor; its gradient is not reduced."""
        return shard(x, self.groups, dim, gradient="own")

    def swap(self, x: Tensor, cut: int, other: int, size: int) -> Tensor:
        """Reshards tokens from dim `cut`, whose full length is `size`, to dim `other`."""
        return swap_sharded_dim(x, cut, other, self.groups, size)

    def attention(self, length: int) -> Mix:
        return partial(attention, groups=self.groups, length=length)

    def enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Sets the groups of a forward, and averages the gradients of the model's inputs."""
        groups = self._opened = self.degree.now

        def averaged(value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad and groups.all.size > 1:
                return _MeanGradient.apply(value, groups.all)
            return value

        return tuple(map(averaged, args)), {name: averaged(v) for name, v in kwargs.items()}

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """Clears the groups; also called when a forward fails."""
        self._opened = None

    def draw_caption_drops(
        self, embedder: nn.Module, args: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor] | None:
        """Broadcasts the first rank's random choice of dropped captions."""
        y, given = args
        assert isinstance(embedder, CaptionEmbedder)
        if given is not None or not embedder.training or embedder.drop <= 0:
            return None
        dropped = (torch.rand(len(y), device=y.device) < embedder.drop).to(torch.uint8)
        for rank_group in (self.tensor, self.groups.all):
            if rank_group.size == 1:
                continue
            broadcast(dropped, _first(rank_group), rank_group.process_group)
        return y, dropped.bool()


class ShardedBlock(STDiTBlock):
    """A block on a shard of a clip's tokens; the first block gets all tokens and shards them."""

    adapter: ClipAdapter
    cuts: bool

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        y_mask: Tensor | None,
        modulation: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        grid: Grid,
        given: ConditionFrames | None = None,
    ) -> Tensor:
        assert given is None, "models with image_conditioning are not wired"
        cut = self.adapter.scheme(x, grid).cut
        x = self.own(x, grid)
        if cut == FRAMES and modulation.shape[2] > 1:
            modulation = self.adapter.part(modulation, 2)
        return super().forward(x, y, y_mask, modulation, rotation, grid)

    def own(self, x: Tensor, grid: Grid) -> Tensor:
        return self.adapter.part(x, self.adapter.scheme(x, grid).cut) if self.cuts else x

    def attend(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        grid: Grid,
        mix: Mix = nn.functional.scaled_dot_product_attention,
    ) -> Tensor:
        scheme = self.adapter.scheme(x, grid)
        cut, other = scheme.cut, FRAMES + PLACES - scheme.cut
        if cut != (FRAMES if self.temporal else PLACES):
            return super().attend(x, rotation, grid, mix)
        sizes = {FRAMES: grid[0], PLACES: grid[1]}
        if scheme.by == "swap":
            x = self.adapter.swap(x.to(working_dtype(x)), cut, other, sizes[cut])
            out = super().attend(x, rotation, grid, mix)
            return self.adapter.swap(out, other, cut, sizes[other])
        if rotation is not None:
            cos, sin = rotation
            rotation = self.adapter.part(cos, 0), self.adapter.part(sin, 0)
        return super().attend(x, rotation, grid, self.adapter.attention(sizes[cut]))


class ShardedFinalLayer(FinalLayer):
    """The final layer on a shard of the tokens; gathers the patches on all ranks."""

    adapter: ClipAdapter

    def forward(
        self, x: Tensor, t: Tensor, t0: Tensor | None, x_mask: Tensor | None, grid: Grid
    ) -> Tensor:
        cut = self.adapter.scheme(x, grid).cut
        if cut == FRAMES and x_mask is not None:
            x_mask = self.adapter.part(x_mask, 1)
        out = super().forward(x, t, t0, x_mask, grid)
        groups = self.adapter.groups
        length = grid[0] if cut == FRAMES else grid[1]
        return unshard(out, groups, cut, length, gradient="alike")


class _MeanGradient(torch.autograd.Function):
    """Identity whose gradient is averaged over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank_group: RankGroup) -> Tensor:
        ctx.rank_group = rank_group
        return x.view_as(x)

    @staticmethod
    @once_differentiable("sequence parallelism of an STDiT", linear=True)
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        whole = grad.contiguous().clone()
        all_reduce(whole.view(-1), "mean", ctx.rank_group.process_group)
        return whole, None


def working_dtype(x: Tensor) -> torch.dtype:
    """Dtype of linear layers: autocast's if enabled."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


@cache
def _both(sharded: type[nn.Module], kind: type[nn.Module]) -> Any:
    """Derives a class named like `kind` from both; from `sharded` alone if it subclasses `kind`."""
    return type(kind.__name__, (sharded, kind) if kind not in sharded.__mro__ else (sharded,), {})


def _first(rank_group: RankGroup) -> int:
    """Returns the first rank of a group as its index in the process group."""
    return rank_group.group_order().index(0)


def _width(model: STDiT3, tensor: RankGroup) -> Width:
    """Returns the dimensions in the configuration, so that all pipeline stages agree."""
    return Width(
        channels=model.hidden_size,
        heads=max(1, model.num_heads // tensor.size),
        head_dim=model.hidden_size // model.num_heads,
        hidden=max(1, int(model.hidden_size * model.mlp_ratio) // tensor.size),
        depth=model.depth,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def _of_kind(root: nn.Module, kind: type[Found]) -> list[Found]:
    """Returns `root` and its descendants of a type; `root` may be wrapped or missing."""
    return [module for module in root.modules() if isinstance(module, kind)]
