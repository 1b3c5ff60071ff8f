"""Attention over a sequence that lies on several ranks: its FLOPs, bytes and seconds, by formula.

With B batch, H heads, G KV heads, L and K the tokens of queries and keys, D and E the dims of
queries and values, s the bytes of an element and w those of what partial results are kept in (4,
and 8 for float64), u ulysses, o outer, i inner and n = o i places: a place's keys and values, and
their gradients are

    kv = B (G / u) (K / n) (D + E) s        grads = kv w / s

| | inner ring | outer ring |
|---|---|---|
| forward | o (i - 1) kv | (o - 1) kv |
| backward | o (i - 1) (kv + grads) | (o - 1) (kv + grads) |

In units of B H (L / N) D elements a flat ring of N therefore sends 2 (N - 1) forward and 4 (N - 1)
backward in float32, where the two rings of RSA send 2 (N - 1) and 6 (N - 1). Ulysses sends
(u - 1) / u of a rank's q, k, v and output, forward and backward alike; KV heads that several ranks
need are sent to each.

Along the outer ring each rank of a node sends what a flat ring's one rank at the node's end would
send i times, and a bit: (o - 1) blocks instead of (n - 1).

A step of the ring sends while it computes: with c the seconds of a block and f, s those of a hop
along the inner and the outer ring, a forward takes

    turn = (i - 1) max(c, f) + c        forward = (o - 1) max(turn, s) + turn

and a backward the same with the backward's messages and 5/2 of the operations. An exchange of
heads is not hidden. Under a causal mask a balanced layout (zigzag) gives every rank half of the
pairs; the plain layout's last rank has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.hardware.cluster import Cluster, Device, Link
from gulliver.hardware.costs import (
    BACKWARD_OF_ATTENTION,
    ITEM_BYTES,
    all_to_all_seconds,
    matmul_seconds,
    point_to_point_seconds,
    wire_bytes,
)

EXCHANGE_LAUNCHES, EXCHANGE_RANK_LAUNCHES = 7, 8
"""Operations that pack and unpack an exchange of heads, and more of them for each of its ranks."""
RING_LAUNCHES, RING_RANK_LAUNCHES = 58, 26
"""Operations of a ring's attention, forward and backward, beside those of a whole one, and more of
them for each of its ranks: blocks, how they are merged, and what is kept of them. All four are
counted from steps of 2 and of 4 ranks (tests/data_centric/test_step_prices.py counts them
again)."""
GATHER_LAUNCHES = 5
"""Operations that pack and unpack a sequence which tensor ranks gather, or add up and share."""


@dataclass(frozen=True)
class AttentionShape:
    """One attention."""

    batch: int
    # Number of query heads.
    heads: int
    # Number of key and value heads.
    kv_heads: int
    # Tokens of the whole sequence.
    length: int
    # Dims of a query and of a key.
    head_dim: int
    # Tokens of the keys; None is `length`.
    key_length: int | None = None
    # Dims of a value; None is `head_dim`.
    value_dim: int | None = None
    # Float64, float32, bfloat16 or float16.
    dtype: str = "float32"
    # Half of the pairs are computed.
    causal: bool = False

    @property
    def keys(self) -> int:
        """Tokens of the keys."""
        return self.length if self.key_length is None else self.key_length

    @property
    def values(self) -> int:
        """Dims of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of an element of partial results."""
        return max(4, self.item)


@dataclass(frozen=True)
class SequenceSplit:
    """How a sequence is split over ranks, in numbers."""

    # Ranks that exchange sequence for heads.
    ulysses: int
    # Places of the outer ring.
    outer: int
    # Places of the inner ring.
    inner: int
    # KV heads of the ranks of one place together; one that several ranks need counts for each of
    # them.
    kv_heads: int
    # Every rank computes as many pairs of a causal mask.
    balanced: bool = True

    @property
    def ring(self) -> int:
        """Places of both rings."""
        return self.outer * self.inner

    @property
    def degree(self) -> int:
        """Ranks that share the sequence."""
        return self.ring * self.ulysses


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes that each rank sends, the mean of all ranks."""

    # Bytes of the exchanges of heads in the forward.
    ulysses_forward: float = 0.0
    # Bytes of those in the backward.
    ulysses_backward: float = 0.0
    # Bytes along the inner ring in the forward.
    inner_forward: float = 0.0
    # Bytes along it in the backward.
    inner_backward: float = 0.0
    # Bytes along the outer ring in the forward.
    outer_forward: float = 0.0
    # Bytes along it in the backward.
    outer_backward: float = 0.0

    @property
    def ring(self) -> float:
        """Bytes along both rings, forward and backward."""
        return self.inner_forward + self.inner_backward + self.outer_forward + self.outer_backward

    @property
    def forward(self) -> float:
        """Bytes of the whole forward."""
        return self.ulysses_forward + self.inner_forward + self.outer_forward

    @property
    def backward(self) -> float:
        """Bytes of the whole backward."""
        return self.ulysses_backward + self.inner_backward + self.outer_backward


@dataclass(frozen=True)
class AttentionSeconds:
    """Seconds of a forward and a backward."""

    # Seconds of both, with what they wait for.
    total: float
    # Seconds if nothing had to be sent.
    compute: float
    # Seconds of the exchanges of heads.
    exchanges: float


def split_attention_bytes(split: SequenceSplit, shape: AttentionShape) -> AttentionBytes:
    """Bytes that each rank sends in one attention; see the top of the file."""
    forward, backward = _hop_bytes(split, shape)
    inner, outer = split.outer * (split.inner - 1), split.outer - 1
    exchanged = head_exchange_bytes(split, shape)
    return AttentionBytes(
        *(exchanged, exchanged),
        *(inner * forward, inner * backward),
        *(outer * forward, outer * backward),
    )


def head_exchange_bytes(split: SequenceSplit, shape: AttentionShape) -> float:
    """Bytes that each rank sends in the exchanges of one forward, or of one backward."""
    of_q = shape.batch * shape.length / split.degree * shape.heads
    of_kv = shape.batch * shape.keys / split.degree * split.kv_heads
    sent = of_q * shape.head_dim + of_kv * (shape.head_dim + shape.values) + of_q * shape.values
    return wire_bytes([(split.ulysses, Link(0.0, 1.0))], int(sent * shape.item), "all_to_all")[0]


def exchange_launches(ranks: int) -> float:
    """Operations that pack and unpack one exchange of heads."""
    return EXCHANGE_LAUNCHES + EXCHANGE_RANK_LAUNCHES * ranks


def hop_launches(ranks: int) -> float:
    """Operations of one hop of a ring and its attention, beside those of a whole attention."""
    return (RING_LAUNCHES + RING_RANK_LAUNCHES * ranks) / (2 * (ranks - 1))


def attention_seconds(
    device: Device,
    rows: int,
    queries: int,
    keys: int,
    dims: tuple[int, int],
    dtype: str = "float32",
    backward: bool = False,
) -> float:
    """Seconds of softmax(Q K^T) V on one rank: 2 rows queries keys (D + E) FLOPs forward.

    Args:
        device: device to compute on.
        rows: batch times heads.
        queries: tokens that attend.
        keys: tokens that are attended to.
        dims: dims of queries and keys, and of values.
        dtype: dtype of the tensors.
        backward: count the backward too: five products of matrices beside the forward's two.
    """
    forward = sum(matmul_seconds(device, queries, rows * dim, keys, dtype) for dim in dims)
    return forward * (1 + BACKWARD_OF_ATTENTION) if backward else forward


def split_attention_seconds(
    cluster: Cluster, shape: AttentionShape, split: SequenceSplit, stride: int = 1
) -> AttentionSeconds:
    """Seconds of a forward and a backward on every `stride`-th rank of a cluster."""
    lines = _Lines(cluster.resized(split.degree * stride), split, stride)
    block = _block_seconds(cluster.device, shape, split)
    forward, backward = _hop_bytes(split, shape)
    total = lines.ring_seconds(block, forward)
    total += lines.ring_seconds(BACKWARD_OF_ATTENTION * block, backward)
    exchanges = 2 * lines.exchange_seconds(head_exchange_bytes(split, shape))
    compute = split.ring * (1 + BACKWARD_OF_ATTENTION) * block
    return AttentionSeconds(total + exchanges, compute, exchanges)


def _hop_bytes(split: SequenceSplit, shape: AttentionShape) -> tuple[float, float]:
    """Bytes of one hop of one place's block, forward and backward, with what comes home."""
    dims, places = shape.head_dim + shape.values, split.ulysses * split.ring
    block = shape.batch * split.kv_heads * shape.keys / places * dims
    return block * shape.item, block * (shape.item + shape.wide)


def _block_seconds(device: Device, shape: AttentionShape, split: SequenceSplit) -> float:
    """Seconds of a place's queries and another's keys, forward, on the rank with most to do."""
    half = shape.causal and (split.balanced or split.ring == 1)
    rows = shape.batch * -(-shape.heads // split.ulysses)
    queries = max(1, shape.length // split.ring // (2 if half else 1))
    keys = max(1, shape.keys // split.ring)
    return attention_seconds(
        device, rows, queries, keys, (shape.head_dim, shape.values), shape.dtype
    )


class _Lines:
    """What the lines of a split travel on."""

    def __init__(self, cluster: Cluster, split: SequenceSplit, stride: int) -> None:
        self._cluster, self._split, self._stride = cluster, split, stride

    def ring_seconds(self, block: float, hop_bytes: float) -> float:
        """A turn of both rings, `block` seconds of work for each block."""
        split = self._split
        fast = self._hop(split.ulysses, split.inner, hop_bytes)
        slow = self._hop(split.ulysses * split.inner, split.outer, hop_bytes)
        turn = (split.inner - 1) * max(block, fast) + block
        return (split.outer - 1) * max(turn, slow) + turn

    def exchange_seconds(self, sent: float) -> float:
        """An all-to-all in which each rank sends so much."""
        u = self._split.ulysses
        if u == 1:
            return 0.0
        return all_to_all_seconds(self._cluster.crossed(self._stride, u), int(sent * u / (u - 1)))

    def _hop(self, stride: int, size: int, count: float) -> float:
        axes = self._cluster.crossed(stride * self._stride, size)
        return point_to_point_seconds(axes[0][1], int(count)) if axes else 0.0
