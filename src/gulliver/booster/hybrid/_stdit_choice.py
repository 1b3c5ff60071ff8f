"""Where the tokens of a clip are cut, and how attention reaches over the cut.

Tokens [B, T, S, C] are cut along the spatial dim S or the temporal dim T. Attention along the other
dim needs nobody else; attention along the cut runs

- by *swap*: the whole attention with the other dim cut instead, an all-to-all before it and one
  after it (Zhao et al., DSP: Dynamic Sequence Parallelism, 2024). With M bytes of tokens on a rank
  it sends about 2 M (N - 1) / N where an exchange of heads sends 4 M (N - 1) / N. With fewer frames
  than ranks some have nothing to do meanwhile
- by *heads*: q, k, v and the output are exchanged for heads (Ulysses), or
- by *ring*: keys and values go round.

`choose_scheme` adds up a pair of a spatial and a temporal block, forward and backward, for the rank
with most to do. Every rank finds the same, for the costs are the same on all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gulliver.errors import GulliverError, nearest
from gulliver.hardware import (
    Cluster,
    all_to_all_seconds,
    attention_seconds,
    linear_seconds,
    resharding_bytes,
)
from gulliver.parallel.sequence import SequencePlan, Shape, predict, volume

By = Literal["swap", "heads", "ring"]
# How attention may reach over the cut, by sequence_parallelism_mode.
WAYS: dict[str, tuple[By, ...]] = {"all_to_all": ("swap", "heads"), "ring_attn": ("ring",)}
# Dims of the tokens [B, T, S, C].
FRAMES, PLACES = 1, 2


@dataclass(frozen=True)
class Scheme:
    """One way to run a clip on several ranks."""

    # Dim of the tokens that is cut, `FRAMES` or `PLACES`.
    cut: int
    # How attention along that dim runs.
    by: By

    def __str__(self) -> str:
        return f"{'frames' if self.cut == FRAMES else 'places'} cut, by {self.by}"


# All of them by name.
SCHEMES = {
    f"{n}-{by}": Scheme(d, by)
    for n, d in (("places", PLACES), ("frames", FRAMES))
    for by in ("swap", "heads", "ring")
}


@dataclass(frozen=True)
class Width:
    """Sizes of a model that decide what a clip costs, on one tensor rank."""

    channels: int
    # Number of heads of this rank.
    heads: int
    # Dims of each head.
    head_dim: int
    # This rank's hidden units of an MLP.
    hidden: int
    # Pairs of blocks.
    depth: int
    # Dtype of the parameters, as torch calls it.
    dtype: str = "float32"


@dataclass(frozen=True)
class Clip:
    """The tokens of a call."""

    # Clips in the batch, B.
    batch: int
    # Tokens along the temporal dim, T.
    frames: int
    # Tokens along the spatial dim, S.
    places: int

    def size(self, dim: int) -> int:
        """Tokens along the temporal dim (`FRAMES`) or the spatial one (`PLACES`)."""
        return self.frames if dim == FRAMES else self.places

    def attention(self, dim: int, width: Width) -> Shape:
        """The attention along a dim, of the whole clip."""
        rows = self.batch * self.size(FRAMES + PLACES - dim)
        heads = width.heads, width.heads
        return Shape(rows, *heads, self.size(dim), width.head_dim, dtype=width.dtype)


@dataclass(frozen=True)
class PredictedScheme:
    """A scheme and what it should cost in one forward and backward of all blocks."""

    scheme: Scheme
    # Seconds of the rank with most to do.
    seconds: float
    # Bytes of each rank, the mean of all.
    sent: float


@dataclass(frozen=True)
class ChosenScheme:
    """The scheme with the least predicted seconds, and the others."""

    # Scheme to use.
    scheme: Scheme
    # Clip that it is for.
    clip: Clip
    degree: int
    # All that were considered, the best first.
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
    """Considers every scheme of a mode."""
    if mode not in WAYS:
        raise GulliverError(
            f"an STDiT is wired for {' or '.join(map(repr, WAYS))}, not {mode!r}: the modes that "
            "share sequences over the tensor axis come with tensor parallelism"
        )
    ways = _ways(width, plan, mode)
    names = [f"{name}-{by}" for name in ("places", "frames") for by in ways]
    if fixed is not None:
        if fixed not in names:
            raise GulliverError(f"no scheme {fixed!r} under {mode}: {nearest(fixed, names)}")
        names = [fixed]
    found = [_predict(SCHEMES[name], clip, width, plan, cluster) for name in names]
    found.sort(key=lambda p: (p.seconds, p.sent))
    return ChosenScheme(found[0].scheme, clip, plan.degree, tuple(found))


def _ways(width: Width, plan: SequencePlan, mode: str) -> list[By]:
    """The ways of a mode for which there are enough heads."""
    ways: list[By] = [by for by in WAYS[mode] if by == "swap" or plan.ulysses <= width.heads]
    if not ways:
        raise GulliverError(
            f"{plan} exchanges heads between more ranks than the {width.heads} heads that each "
            "tensor rank has: put the other ranks into the ring"
        )
    return ways


def _predict(
    scheme: Scheme, clip: Clip, width: Width, plan: SequencePlan, cluster: Cluster
) -> PredictedScheme:
    costs = _Costs(clip, width, plan, cluster)
    cut, other = scheme.cut, FRAMES + PLACES - scheme.cut
    # The attention that stays on the rank, then the one along the cut.
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
        """All of both blocks but self-attention."""
        w = self.width
        inner = w.heads * w.head_dim
        return 2 * self._linear(self._tokens(cut), w.channels, 2 * inner + 2 * w.hidden)

    def own(self, cut: int) -> float:
        """The projections of one self-attention."""
        w = self.width
        return self._linear(self._tokens(cut), w.channels, 4 * w.heads * w.head_dim)

    def attention(self, cut: int, along: int) -> float:
        """Seconds of the rows that a rank has whole while another dim is cut."""
        rows = self.clip.batch * self._most(cut) * self.width.heads
        tokens, dims = self.clip.size(along), (self.width.head_dim, self.width.head_dim)
        device = self.cluster.device
        return attention_seconds(device, rows, tokens, tokens, dims, self.dtype, backward=True)

    def swap_bytes(self) -> float:
        """Bytes of one swap on each rank, the mean: what has another owner afterwards."""
        frames, places = self.plan.lay(self.clip.frames), self.plan.lay(self.clip.places)
        token = self.clip.batch * self.width.channels * self._item()
        return resharding_bytes(frames.sizes(), places.sizes(), token)

    def swap(self) -> float:
        """Seconds of one swap."""
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

    def _item(self) -> int:
        return self.clip.attention(PLACES, self.width).item
