"""How fast a GPU computes blocks of attention, by their length, against one full call.

A ring calls a kernel for each block and merges what it gives: short blocks fill the GPU less, and
each is merged in float32. The floating-point operations per second of a block, with its merge, over
those of the kernel on the whole sequence say how long blocks must be, and so how many ranks a
sequence is worth. One process, one GPU, no process group; without CUDA the part says so and ends.

Operations are counted as is usual: 4 x batch x heads x queries x keys x head dim forward, 2.5 times
that backward, with nothing for the merge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks._harness import Report, Spread, alternate
from benchmarks._sequence_shared import Options
from gulliver.parallel.sequence import Mask
from gulliver.parallel.sequence.heads import deal_heads
from gulliver.parallel.sequence.kernels import (
    KERNELS,
    AttentionBlock,
    Gradients,
    How,
    Partial,
    Rows,
    asked_of,
    attend,
    attend_backward,
)
from gulliver.parallel.sequence.mask import tiles

MEASURED = ("cuda flash", "cuda cudnn")
BACKWARD = 2.5
"""Five products of matrices to the forward's two."""


@dataclass(frozen=True)
class Sizes:
    """What is computed."""

    heads: int = 16
    head_dim: int = 128
    length: int = 32768
    blocks: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    dtype: torch.dtype = torch.bfloat16

    def operations(self, queries: int, keys: int, backward: bool) -> float:
        """Floating-point operations of a rectangle without mask."""
        forward = 4.0 * self.heads * queries * keys * self.head_dim
        return BACKWARD * forward if backward else forward

    def tensors(self, length: int, device: str) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        shape = (1, self.heads, length, self.head_dim)
        draw = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=draw).to(device, self.dtype) for _ in range(4)]


def report_gpu(options: Options, report: Report) -> None:
    """Adds a row for each kernel and length, or a note that there is no GPU."""
    if not torch.cuda.is_available():
        report.notes.append("gpu: not measured, there is no CUDA device here")
        return
    sizes = Sizes(length=4096, blocks=(512, 2048)) if options.quick else Sizes()
    for kernel in MEASURED:
        q, _, v, _ = sizes.tensors(sizes.blocks[0], "cuda")
        reason = KERNELS[kernel].lacks(asked_of(q, v))
        if reason:
            report.notes.append(f"gpu: {kernel} was not measured: {reason}")
            continue
        report_kernel(sizes, kernel, "cuda", options.rounds, report)


def report_kernel(sizes: Sizes, kernel: str, device: str, rounds: int, report: Report) -> None:
    """Adds rows for one kernel."""
    rates = measured(sizes, kernel, device, rounds)
    for backward in (False, True):
        what = "backward" if backward else "forward"
        whole = rates[None, backward].median
        for block in sizes.blocks:
            found = rates[block, backward]
            report.rows.append(
                (
                    "gpu",
                    f"{kernel}, {what}, blocks of {block}",
                    f"{_tera(found)} TFLOP/s",
                    f"one call of {sizes.length}: {whole / 1e12:.3g} TFLOP/s",
                    f"{found.median / whole:.3f}",
                )
            )
            name = f"{kernel} {what} {block}".replace(" ", "_")
            report.figures[name] = found.median
        report.figures[f"{kernel} {what} whole".replace(" ", "_")] = whole


def measured(
    sizes: Sizes, kernel: str, device: str, rounds: int
) -> dict[tuple[int | None, bool], Spread]:
    """Operations per second by block length, None for one call of all, forward and backward."""
    calls: dict[tuple[int | None, bool], tuple[Callable[[], object], float]] = {}
    for block in (*sizes.blocks, None):
        length = sizes.length if block is None else block
        forward, backward = (one_call if block is None else one_block)(
            sizes, kernel, device, length
        )
        calls[block, False] = forward, sizes.operations(length, length, False)
        calls[block, True] = backward, sizes.operations(length, length, True)
    contestants = {
        str(key): _rate(call, operations, device) for key, (call, operations) in calls.items()
    }
    found = alternate(contestants, rounds, warm_up=2)
    return {key: found[str(key)] for key in calls}


Calls = tuple[Callable[[], object], Callable[[], object]]
"""A forward and a backward, to be called again and again."""


def one_call(sizes: Sizes, kernel: str, device: str, length: int) -> Calls:
    """The kernel on all tokens at once."""
    q, k, v, grad = sizes.tensors(length, device)
    block, chosen = AttentionBlock(q, k, v, sizes.head_dim**-0.5), KERNELS[kernel]
    out, lse = chosen.forward(block)
    out = out.to(q.dtype)
    return lambda: chosen.forward(block), lambda: chosen.backward(grad, block, out, lse)


def one_block(sizes: Sizes, kernel: str, device: str, length: int) -> Calls:
    """A block as a ring computes it: the kernel, and the merge into what there is."""
    q, k, v, grad = sizes.tensors(length, device)
    runs = deal_heads(sizes.heads, sizes.heads, 1).runs(0)
    how = How(sizes.head_dim**-0.5, Mask().rules(1, length, length), runs, kernel)
    held = ((0, length),)
    found = tiles(held, held, how.rules)
    # Queries have seen a block before: merging into nothing would be cheaper.
    partial = Partial.empty(q, sizes.head_dim)
    attend(partial, q, k, v, found, how)
    rows = Rows(q, grad, partial.out.to(q.dtype), partial.lse.clone())
    into = Gradients(*(torch.zeros_like(t, dtype=partial.out.dtype) for t in (q, k, v)))
    return (
        lambda: attend(partial, q, k, v, found, how),
        lambda: attend_backward(into, rows, k, v, found, how),
    )


def _rate(call: Callable[[], object], operations: float, device: str) -> Callable[[], float]:
    """Operations per second of some calls in a row, as many as take 20 ms or more."""

    def seconds(count: int) -> float:
        _wait(device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        return time.perf_counter() - started

    times = 1

    def rate() -> float:
        nonlocal times
        while (taken := seconds(times)) < 0.02:
            times *= 2
        return operations * times / taken

    return rate


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _tera(rate: Spread) -> str:
    low, middle, high = (f"{r / 1e12:.3g}" for r in (rate.low, rate.median, rate.high))
    return f"{middle} ({low} to {high})"
