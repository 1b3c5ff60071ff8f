"""FLOPs, bytes and seconds of attention over a sequence sharded over several ranks.

Let B be the batch size, H and G the numbers of query and KV heads, L and K of query and key tokens,
D and E the dims of queries and values, s the bytes per element and w per element of partial results
(4, or 8 for float64). With u Ulysses ranks, o outer and i inner ring ranks and n = o i, the keys
and values of one ring position and their gradients take

    kv = B (G / u) (K / n) (D + E) s        grads = kv w / s

bytes. A rank sends

| | inner ring | outer ring |
| --- | --- | --- |
| forward | o (i - 1) kv | (o - 1) kv |
| backward | o (i - 1) (kv + grads) | (o - 1) (kv + grads) |

In units of B H (L / N) D elements a flat ring of N therefore sends 2 (N - 1) forward and 4 (N - 1)
backward in float32, while the two rings of RSA send 2 (N - 1) and 6 (N - 1). Ulysses sends (u - 1)
/ u of a rank's q, k, v and output, in forward and in backward; KV heads that several ranks need are
sent to each of them.

Along the outer ring, each rank sends (o - 1) blocks between nodes; in a flat ring, the last rank of
a node sends (n - 1).

A ring step overlaps communication with compute: with c seconds per block, and f and s seconds per
hop along the inner and outer ring, forward takes

    turn = (i - 1) max(c, f) + c        forward = (o - 1) max(turn, s) + turn

and backward the same, with its own messages and 5/2 of the operations. Head exchanges do not
overlap. Under a causal mask a balanced layout (zigzag) gives every rank half of the pairs; the last
rank of the plain layout has all of them.
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
"""Packing operations of a head exchange: a constant, and per rank."""
RING_LAUNCHES, RING_RANK_LAUNCHES = 58, 26
"""Additional operations of ring attention over plain attention, in forward and backward: a
constant, and per rank. All four numbers were counted in steps of 2 and 4 ranks
(tests/data_centric/test_step_prices.py counts them again).
"""
GATHER_LAUNCHES = 5  # packing operations if tensor ranks all-gather, or reduce-scatter, a sequence


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call."""

    batch: int
    # Number of query heads.
    heads: int
    # Number of key and value heads.
    kv_heads: int
    # Tokens of the whole sequence.
    length: int
    # Dims of a query and of a key.
    head_dim: int
    # Tokens of the keys; None for `length`.
    key_length: int | None = None
    # Dims of a value; None for `head_dim`.
    value_dim: int | None = None
    # Float64, float32, bfloat16 or float16.
    dtype: str = "float32"
    # Whether only half of the pairs are computed.
    causal: bool = False

    @property
    def keys(self) -> int:
        return self.length if self.key_length is None else self.key_length

    @property
    def values(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes per element of partial results."""
        return max(4, self.item)


@dataclass(frozen=True)
class SequenceSplit:
    """Number of ranks along each dim of a sharded sequence."""

    # Ranks that exchange sequence for heads (Ulysses).
    ulysses: int
    # Size of the outer ring.
    outer: int
    # Size of the inner ring.
    inner: int
    # KV heads over the ranks of one position; one that several ranks need counts for each of them.
    kv_heads: int
    # Whether every rank computes as many pairs of a causal mask.
    balanced: bool = True

    @property
    def ring(self) -> int:
        return self.outer * self.inner

    @property
    def degree(self) -> int:
        return self.ring * self.ulysses


@dataclass(frozen=True)
class AttentionBytes:
    """Mean bytes sent by each rank."""

    # Bytes of head exchanges in the forward.
    ulysses_forward: float = 0.0
    # Bytes of head exchanges in the backward.
    ulysses_backward: float = 0.0
    # Bytes along the inner ring in the forward.
    inner_forward: float = 0.0
    # Bytes along the inner ring in the backward.
    inner_backward: float = 0.0
    # Bytes along the outer ring in the forward.
    outer_forward: float = 0.0
    # Bytes along the outer ring in the backward.
    outer_backward: float = 0.0

    @property
    def ring(self) -> float:
        return self.inner_forward + self.inner_backward + self.outer_forward + self.outer_backward

    @property
    def forward(self) -> float:
        return self.ulysses_forward + self.inner_forward + self.outer_forward

    @property
    def backward(self) -> float:
        return self.ulysses_backward + self.inner_backward + self.outer_backward


@dataclass(frozen=True)
class AttentionSeconds:
    """Seconds of attention in forward and in backward."""

    # Seconds of both, including communication.
    total: float
    # Seconds without communication.
    compute: float
    # Seconds of head exchanges.
    exchanges: float


def split_attention_bytes(split: SequenceSplit, shape: AttentionShape) -> AttentionBytes:
    """Bytes sent by each rank in one attention call; see the module docstring."""
    forward, backward = _hop_bytes(split, shape)
    inner, outer = split.outer * (split.inner - 1), split.outer - 1
    exchanged = head_exchange_bytes(split, shape)
    return AttentionBytes(
        *(exchanged, exchanged),
        *(inner * forward, inner * backward),
        *(outer * forward, outer * backward),
    )


def head_exchange_bytes(split: SequenceSplit, shape: AttentionShape) -> float:
    of_q = shape.batch * shape.length / split.degree * shape.heads
    of_kv = shape.batch * shape.keys / split.degree * split.kv_heads
    sent = of_q * shape.head_dim + of_kv * (shape.head_dim + shape.values) + of_q * shape.values
    return wire_bytes([(split.ulysses, Link(0.0, 1.0))], int(sent * shape.item), "all_to_all")[0]


def exchange_launches(ranks: int) -> float:
    return EXCHANGE_LAUNCHES + EXCHANGE_RANK_LAUNCHES * ranks


def hop_launches(ranks: int) -> float:
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
    """Seconds of softmax(Q K^T) V on one rank: 2 rows queries keys (D + E) FLOPs forward."""
    forward = sum(matmul_seconds(device, queries, rows * dim, keys, dtype) for dim in dims)
    return forward * (1 + BACKWARD_OF_ATTENTION) if backward else forward


def split_attention_seconds(
    cluster: Cluster, shape: AttentionShape, split: SequenceSplit, stride: int = 1
) -> AttentionSeconds:
    """Seconds of attention over every `stride`-th rank of a cluster."""
    lines = _Lines(cluster.resized(split.degree * stride), split, stride)
    block = _block_seconds(cluster.device, shape, split)
    forward, backward = _hop_bytes(split, shape)
    total = lines.ring_seconds(block, forward)
    total += lines.ring_seconds(BACKWARD_OF_ATTENTION * block, backward)
    exchanges = 2 * lines.exchange_seconds(head_exchange_bytes(split, shape))
    compute = split.ring * (1 + BACKWARD_OF_ATTENTION) * block
    return AttentionSeconds(total + exchanges, compute, exchanges)


def _hop_bytes(split: SequenceSplit, shape: AttentionShape) -> tuple[float, float]:
    """Bytes of a block sent in one ring hop, in forward and, with gradients, in backward."""
    dims, places = shape.head_dim + shape.values, split.ulysses * split.ring
    block = shape.batch * split.kv_heads * shape.keys / places * dims
    return block * shape.item, block * (shape.item + shape.wide)


def _block_seconds(device: Device, shape: AttentionShape, split: SequenceSplit) -> float:
    """Forward seconds of one ring position's queries with another's keys, on the busiest rank."""
    half = shape.causal and (split.balanced or split.ring == 1)
    rows = shape.batch * -(-shape.heads // split.ulysses)
    queries = max(1, shape.length // split.ring // (2 if half else 1))
    keys = max(1, shape.keys // split.ring)
    return attention_seconds(
        device, rows, queries, keys, (shape.head_dim, shape.values), shape.dtype
    )


class _Lines:
    def __init__(self, cluster: Cluster, split: SequenceSplit, stride: int) -> None:
        self._cluster, self._split, self._stride = cluster, split, stride

    def ring_seconds(self, block: float, hop_bytes: float) -> float:
        """Seconds of a pass over both rings, with `block` seconds of compute per block."""
        split = self._split
        fast = self._hop(split.ulysses, split.inner, hop_bytes)
        slow = self._hop(split.ulysses * split.inner, split.outer, hop_bytes)
        turn = (split.inner - 1) * max(block, fast) + block
        return (split.outer - 1) * max(turn, slow) + turn

    def exchange_seconds(self, sent: float) -> float:
        u = self._split.ulysses
        if u == 1:
            return 0.0
        return all_to_all_seconds(self._cluster.crossed(self._stride, u), int(sent * u / (u - 1)))

    def _hop(self, stride: int, size: int, count: float) -> float:
        axes = self._cluster.crossed(stride * self._stride, size)
        return point_to_point_seconds(axes[0][1], int(count)) if axes else 0.0
