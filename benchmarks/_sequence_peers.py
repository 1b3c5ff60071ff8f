"""Attention of other hands beside ours: the same tensors on the same link, taking turns.

- *all-gather*: K and V are gathered, one call of the kernel, gradients reduced and scattered;
- *two rings*: of the 2021 paper;
- *torch's ring*: the ring inside torch's experimental context parallelism, both of its ways to send
  K and V on, given the CPU kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks._harness import Report, alternate, at_least
from benchmarks._sequence_overlap import rate_for
from benchmarks._sequence_shared import (
    MIB,
    Options,
    milli,
    seconds_of,
    settled,
    shape_of,
    slowest,
    tensors,
)
from benchmarks._sequence_wire import PLANS, RANKS, TWIN
from benchmarks._two_ring import two_ring_attention
from benchmarks.netlab import Net, run
from benchmarks.netlab._ranks import wire_bytes
from gulliver import _compat, _compat_attention
from gulliver.comm import init_world
from gulliver.parallel.sequence import SequencePlan, attention, make_groups
from gulliver.parallel.sequence.choice import volume

OURS, SUMS = tuple(PLANS), "largest difference"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gathered(torch.autograd.Function):
    """The tokens ``[batch, heads, length, dim]`` of all ranks in one; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = x.new_empty((RANKS, *x.shape))
        _compat.all_gather_flat(parts.view(-1), x.contiguous().view(-1))
        return torch.cat(list(parts), 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        parts = torch.stack(grad.chunk(RANKS, 2))
        own = torch.empty_like(parts[0])
        _compat.reduce_scatter_flat(own.view(-1), parts.view(-1))
        return own


class TorchRing(torch.autograd.Function):
    """Torch's ring with the CPU kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rotate: str) -> Tensor:

        def op(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
            return _compat_attention.cpu_flash_forward(
                query, key, value, _scale(query), False, None
            )

        ring, _ = _compat_attention.context_parallel_ring(rotate)
        out, lse = ring(dist.group.WORLD, 2, op, q, k, v)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rotate = rotate
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore

        def op(
            grad_out: Tensor,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            out: Tensor,
            logsumexp: Tensor,
            **_: Any,
        ) -> tuple[Tensor, ...]:
            given = grad_out, query, key, value, out, logsumexp
            return _compat_attention.cpu_flash_backward(*given, _scale(query), False, None)

        _, ring = _compat_attention.context_parallel_ring(ctx.rotate)
        names = ("query", "key", "value", "out", "logsumexp")
        saved = dict(zip(names, ctx.saved_tensors, strict=True))
        given = {"grad_out": grad, "grad_out_name": "grad_out", "is_causal": False, **saved}
        return *ring(dist.group.WORLD, 2, op, **given)[:3], None


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5


def contestants(length: int) -> dict[str, Attention]:
    """Ours first."""
    calls: dict[str, Attention] = {}
    for name, plan in PLANS.items():
        groups = make_groups(plan)
        calls[name] = lambda q, k, v, g=groups: attention(q, k, v, g, length=length)
    twin = make_groups(SequencePlan(inner=RANKS))
    calls["all-gather"] = lambda q, k, v: F.scaled_dot_product_attention(
        q, Gathered.apply(k), Gathered.apply(v)
    )
    calls[TWIN] = lambda q, k, v: two_ring_attention(q, k, v, twin)
    for rotate in ("allgather", "alltoall"):
        calls[f"torch's ring, {rotate}"] = lambda q, k, v, r=rotate: TorchRing.apply(q, k, v, r)
    return calls


def time_peers(options: Options) -> dict[str, tuple[float, ...]]:
    """Seconds of a forward and a backward; bytes sent; how far the gradients are from ours."""
    init_world()
    shape = shape_of(options, RANKS, options.local)
    q, k, v, grad = tensors(shape, RANKS)
    calls = contestants(shape.length)

    def step(name: str) -> None:
        calls[name](q, k, v).backward(grad)

    sent, gradients = {}, {}
    for name in calls:
        q.grad = k.grad = v.grad = None
        step(name)
        gradients[name] = [t.grad.clone() for t in (q, k, v) if t.grad is not None]
        settled()
        before = wire_bytes()[0]
        step(name)
        settled()
        sent[f"{name}, sent"] = (float(wire_bytes()[0] - before),)
    ours = gradients[OURS[0]]
    far = max(
        float((a - b).abs().max() / a.abs().max())
        for other in gradients.values()
        for a, b in zip(ours, other, strict=True)
    )
    turns = {name: lambda n=name: seconds_of(lambda: step(n)) for name in calls}
    times = {n: spread.values for n, spread in alternate(turns, options.rounds).items()}
    return times | sent | {SUMS: (far,)}


def report_peers(options: Options, report: Report) -> None:
    """Reports rows, and the ratio of the ring to the fastest other."""
    shape = shape_of(options, RANKS, options.local)
    sent = volume(PLANS[OURS[0]], shape)
    # As long as computing takes a core of 70 GFLOP/s: about where overlap is hardest.
    operations = 14 * shape.heads * options.local * shape.length * shape.head_dim
    rate = rate_for(1.0, operations / 7e10, sent.forward + sent.backward)
    with Net(RANKS, rate) as net:
        found = slowest(run(time_peers, net, options))
    names = [name for name in found if f"{name}, sent" in found]
    ring = found[OURS[0]].median
    for name in names:
        shown = f"{found[f'{name}, sent'].median / MIB:.1f} MiB"
        row = milli(found[name]), shown, f"{found[name].median / ring:.2f}"
        report.rows.append(("peers", f"{name}, {rate}", *row))
    others = [name for name in names if name not in OURS]
    fastest = min(found[name].median for name in others)
    report.bars.append(at_least("peers: fastest other / ring of 4", fastest / ring, 1.0))
    report.figures["peers"] = {name: list(found[name].values) for name in (*names, SUMS)}
    report.notes.append(f"peers: gradients differ from ours by at most {found[SUMS].median:.1e}")
