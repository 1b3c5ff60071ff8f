"""How many bytes each rank sends, by formula.

With B batch, H heads, G KV heads, L and K the tokens of queries and keys, D and E the dims of
queries and values, s the bytes of an element and w those of what partial results are kept in (4,
and 8 for float64), u ulysses, o outer, i inner and n = o i places: a place's keys and values, and
its queries are

    kv = B (G / u) (K / n) (D + E) s        grads = kv w / s
    q  = B (H / u) (L / n) D s              part = B (H / u) (L / n) (E + 1) w

| | inner ring | outer ring |
|---|---|---|
| forward | o (i - 1) kv | (o - 1) kv |
| backward | o (i - 1) (kv + grads) | (o - 1) (kv + grads) |
| forward, queries go round | o (i - 1) (q + part) | (o - 1) (q + part) |
| backward, queries go round | o (i - 1) (q + dO + O + lse + dQ) | (o - 1) of the same |

In units of B H (L / N) D elements a flat ring of N therefore sends 2 (N - 1) forward and 4 (N - 1)
backward in float32, where the two rings of RSA send 2 (N - 1) and 6 (N - 1) (see
`two_ring_volume`). Ulysses sends (u - 1) / u of a rank's q, k, v and output, forward and backward
alike; KV heads that several ranks need are sent to each.

Along the outer ring each rank of a node sends what a flat ring's one rank at the node's end would
send i times, and a bit: (o - 1) blocks instead of (n - 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gulliver.hardware import Link, wire_bytes
from gulliver.parallel.sequence._heads import deal_heads
from gulliver.parallel.sequence._plan import SequencePlan

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """One attention.

    Attributes:
        batch: rows.
        heads: of queries.
        kv_heads: of keys and values.
        length: tokens of the whole sequence.
        head_dim: of queries and keys.
        key_length: tokens of the keys; None is `length`.
        value_dim: of values; None is `head_dim`.
        dtype: float64, float32, bfloat16 or float16.
        causal: half of the pairs are computed.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    key_length: int | None = None
    value_dim: int | None = None
    dtype: str = "float32"
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
class Volume:
    """Bytes that each rank sends, the mean of all ranks.

    Attributes:
        ulysses_forward: in exchanges of heads.
        ulysses_backward: the same.
        inner_forward: along the inner ring.
        inner_backward: the same.
        outer_forward: along the outer ring.
        outer_backward: the same.
    """

    ulysses_forward: float = 0.0
    ulysses_backward: float = 0.0
    inner_forward: float = 0.0
    inner_backward: float = 0.0
    outer_forward: float = 0.0
    outer_backward: float = 0.0

    @property
    def ring(self) -> float:
        """Along both rings, forward and backward."""
        return self.inner_forward + self.inner_backward + self.outer_forward + self.outer_backward

    @property
    def forward(self) -> float:
        """All of the forward."""
        return self.ulysses_forward + self.inner_forward + self.outer_forward

    @property
    def backward(self) -> float:
        """All of the backward."""
        return self.ulysses_backward + self.inner_backward + self.outer_backward


@dataclass(frozen=True)
class Hops:
    """Bytes of one hop of one place's block, the mean of all ranks.

    Attributes:
        forward: keys and values, or queries.
        forward_home: what comes home with them.
        backward: in the backward.
        backward_home: the same.
    """

    forward: float
    forward_home: float
    backward: float
    backward_home: float


def hops(plan: SequencePlan, shape: Shape, circulate: str = "kv") -> Hops:
    """The messages of one hop of the ring."""
    dealt = deal_heads(shape.heads, shape.kv_heads, plan.ulysses)
    d, e, s, w = shape.head_dim, shape.values, shape.item, shape.wide
    if circulate == "kv":
        heads = sum(b - a for a, b in dealt.keys) / plan.ulysses
        rows = shape.batch * heads * shape.keys / plan.ring
        block = rows * (d + e)
        return Hops(block * s, 0.0, block * s, block * w)
    rows = shape.batch * shape.heads / plan.ulysses * shape.length / plan.ring
    return Hops(rows * d * s, rows * (e + 1) * w, rows * ((d + 2 * e) * s + w), rows * d * w)


def volume(plan: SequencePlan, shape: Shape, circulate: str = "kv") -> Volume:
    """Bytes that each rank sends in one attention; see the top of the file."""
    hop = hops(plan, shape, circulate)
    inner, outer = plan.outer * (plan.inner - 1), plan.outer - 1
    forward, backward = hop.forward + hop.forward_home, hop.backward + hop.backward_home
    exchanged = ulysses_bytes(plan, shape)
    return Volume(
        *(exchanged, exchanged),
        *(inner * forward, inner * backward),
        *(outer * forward, outer * backward),
    )


def ulysses_bytes(plan: SequencePlan, shape: Shape) -> float:
    """Bytes that each rank sends in the exchanges of one forward, or of one backward."""
    u = plan.ulysses
    dealt = deal_heads(shape.heads, shape.kv_heads, u)
    kv_heads = sum(b - a for a, b in dealt.keys)
    link = Link(0.0, 1.0)
    of_q = shape.batch * shape.length / plan.degree * shape.heads
    of_kv = shape.batch * shape.keys / plan.degree * kv_heads
    sent = of_q * shape.head_dim + of_kv * (shape.head_dim + shape.values) + of_q * shape.values
    return wire_bytes([(u, link)], int(sent * shape.item), "all_to_all")[0]


def two_ring_volume(ranks: int, shape: Shape) -> Volume:
    """Bytes of `two_ring_attention`: rings of K and of V, again in the backward, and all-reduces.

    8 (N - 1) units of B H (L / N) D elements (Li et al., Sequence Parallelism, 2021, section 3.2).
    """
    unit = shape.batch * shape.heads * shape.length / ranks * shape.head_dim * shape.item
    return Volume(inner_forward=2 * (ranks - 1) * unit, inner_backward=6 * (ranks - 1) * unit)


def flat(plan: SequencePlan) -> SequencePlan:
    """The same with a ring of one level."""
    return replace(plan, outer=1, inner=plan.ring)
