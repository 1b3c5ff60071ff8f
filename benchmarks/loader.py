"""The data loader: does its memory stand still, and what does it cost beside torch's own?

A mixed stream (five resolutions x four lengths, text and mask beside) runs through the arena, and
beside it, on the same requests and releases, through two others: first fit in a list of buffers,
the policy of the public pinned cache (simulated here: whole buffers, in the order of the list, a
new one where none fits; its releases are granted to it), and an allocation per tensor, as torch's
DataLoader has it. Then time per batch compared with torch's DataLoader, in turns. `benchmarks.gpu`
measures it on a GPU.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.utils import data as torch_data

from benchmarks._harness import Report, Spread, alternate, at_least, at_most, finish
from gulliver.data import DataLoader, PinnedArena

RESOLUTIONS = ((144, 256), (240, 426), (360, 640), (480, 854), (720, 1280))
LENGTHS = (1, 17, 33, 51)
IN_FLIGHT = 4


@dataclass(frozen=True)
class Options:
    """What to measure."""

    batches: int = 2000  # Of the mixed stream
    rounds: int = 5  # Turns of each contestant
    scale: int = 8  # Sides of the stream's frames are divided by this
    threads: int = 1  # Torch's compute threads; 0: as it finds them
    keep: bool = False  # Write the result file


def table(scale: int) -> list[list[Tensor]]:
    """Video, text and mask of each bucket, as shapes only."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return [
        [
            meta(2, 3, frames, height // scale, width // scale),
            meta(2, 1, 120, 1024, dtype=torch.bfloat16),
            meta(2, 120, dtype=torch.bool),
        ]
        for height, width in RESOLUTIONS
        for frames in LENGTHS
    ]


@dataclass
class Counts:
    """What a policy did after its warm-up."""

    requests: int
    hits: int
    allocations: int
    bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the requests that found memory waiting."""
        return self.hits / self.requests


def stream(shapes: list[list[Tensor]], batches: int) -> Iterable[list[Tensor]]:
    """The batches in their order."""
    draw = random.Random(0)
    return (shapes[draw.randrange(len(shapes))] for _ in range(batches))


def run_arena(shapes: list[list[Tensor]], batches: int) -> tuple[Counts, float]:
    """The stream through an arena; also the share of its blocks that is filled."""
    arena = PinnedArena(2**34)
    arena.warm_up(shapes, IN_FLIGHT)
    before, alive, filled = arena.statistics(), deque(), []
    for like in stream(shapes, batches):
        if len(alive) == IN_FLIGHT - 1:
            alive.popleft()
        alive.append(arena.empty_all(like))
        now = arena.statistics()
        filled.append(now.asked / now.in_use)
    after = arena.statistics()
    taken = after.slabs_taken - before.slabs_taken + after.plain
    found = Counts(after.hits + after.misses, after.hits, taken, after.capacity)
    return found, min(filled)


def run_first_fit(
    shapes: list[list[Tensor]], batches: int, buffers_like: list[list[Tensor]] | None = None
) -> Counts:
    """The stream through whole buffers, the first that is large enough.

    The list begins with `IN_FLIGHT` of the largest of each tensor of a batch, in the order of
    `buffers_like`.
    """
    listed = buffers_like or shapes
    largest = [max(like[part].nbytes for like in listed) for part in range(len(listed[0]))]
    buffers = [size for size in largest for _ in range(IN_FLIGHT)]
    taken: set[int] = set()
    alive: deque[list[int]] = deque()
    found = Counts(0, 0, 0, 0)
    for like in stream(shapes, batches):
        if len(alive) == IN_FLIGHT - 1:
            taken -= set(alive.popleft())
        mine: list[int] = []
        for tensor in like:
            fits = (n for n, size in enumerate(buffers) if n not in taken and size >= tensor.nbytes)
            place = next(fits, None)
            found.requests += 1
            found.hits += place is not None
            if place is None:
                place = len(buffers)
                buffers.append(tensor.nbytes)
                found.allocations += 1
            taken.add(place)
            mine.append(place)
        alive.append(mine)
    found.bytes = sum(buffers)
    return found


class Ready(torch_data.Dataset):
    """The same tensor at every index: all time is the loader's."""

    def __init__(self, tensor: Tensor, length: int) -> None:
        self.tensor, self.length = tensor, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor


def per_batch(make: Callable[[], Any]) -> Callable[[], float]:
    """Seconds per batch of an epoch, between its first batch and its last."""

    def run() -> float:
        batches = iter(make())
        next(batches)
        started, count = time.perf_counter(), 0
        for batch in batches:
            count += 1
            del batch
        return (time.perf_counter() - started) / count

    return run


def overhead(rounds: int) -> dict[str, tuple[Spread, Spread, Spread]]:
    """Time per batch of torch's loader, ours as it is, and ours into an arena."""
    found = {}
    for name, numel, workers, length in (
        ("2 KiB, no workers", 64, 0, 4000),
        ("2 KiB, 2 workers", 64, 2, 4000),
        ("16 MiB, 2 workers", 2**19, 2, 240),
    ):
        data = Ready(torch.ones(numel), length)
        arena = PinnedArena(2**28, pin=False)
        arena.warm_up([torch.empty(8, numel, device="meta")], IN_FLIGHT)
        options: dict[str, Any] = {"batch_size": 8, "num_workers": workers}
        makes: dict[str, Callable[[], Any]] = {
            "torch": lambda d=data, o=options: torch_data.DataLoader(d, **o),
            "ours": lambda d=data, o=options: DataLoader(d, **o),
            "arena": lambda d=data, o=options, a=arena: DataLoader(d, arena=a, **o),
        }
        times = alternate({key: per_batch(make) for key, make in makes.items()}, rounds)
        found[name] = (times["torch"], times["ours"], times["arena"])
    return found


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = table(options.scale)
    arena, filled = run_arena(shapes, options.batches)
    first_fit = run_first_fit(shapes, options.batches)
    # The same batches with their small tensors first: these take the large buffers then.
    turned_shapes = [like[::-1] for like in shapes]
    turned_arena, _ = run_arena(turned_shapes, options.batches)
    turned = run_first_fit(turned_shapes, options.batches, buffers_like=shapes)
    tensors = len(shapes[0])
    report = Report(
        "loader",
        "Data loader: five resolutions x four lengths through an arena, and time per batch",
        ("", "Gulliver", "first fit (simulated)", "torch", "ours / torch"),
    )
    report.rows += [
        ("hit rate after warm-up", f"{arena.hit_rate:.2%}", f"{first_fit.hit_rate:.2%}", "0 %", ""),
        (
            "the same, small tensors first",
            f"{turned_arena.hit_rate:.2%}",
            f"{turned.hit_rate:.2%}",
            "0 %",
            "",
        ),
        (
            "allocations per step after warm-up",
            f"{arena.allocations / options.batches:.3f}",
            f"{first_fit.allocations / options.batches:.3f}",
            f"{tensors}",
            "",
        ),
        (
            "memory, MiB (small tensors first)",
            f"{arena.bytes / 2**20:.1f} ({turned_arena.bytes / 2**20:.1f})",
            f"{first_fit.bytes / 2**20:.1f} ({turned.bytes / 2**20:.1f})",
            "",
            "",
        ),
    ]
    report.figures = {
        "hit_rate": arena.hit_rate,
        "first_fit_hit_rate": first_fit.hit_rate,
        "first_fit_allocations": first_fit.allocations,
        "first_fit_hit_rate_small_first": turned.hit_rate,
        "first_fit_allocations_small_first": turned.allocations,
        "bytes": arena.bytes,
        "first_fit_bytes": first_fit.bytes,
        "least_filled": filled,
    }
    report.bars = [
        at_least("hit rate after warm-up", min(arena.hit_rate, turned_arena.hit_rate), 1),
        at_most("allocations after warm-up", arena.allocations + turned_arena.allocations, 0),
    ]
    for name, (theirs, ours, into_arena) in overhead(options.rounds).items():
        for kind, own in (("", ours), (", into the arena", into_arena)):
            report.rows.append(
                (
                    f"us per batch of {name}{kind}",
                    own.shown(".0f", 1e-6),
                    "",
                    theirs.shown(".0f", 1e-6),
                    f"{own.median / theirs.median:.2f}",
                )
            )
            report.figures[f"{name}{kind}"] = {"s": own.median, "torch_s": theirs.median}
    report.notes = [
        f"{options.batches} batches of 3 tensors, sides / {options.scale}, {IN_FLIGHT} batches in "
        f"flight; both policies begin with room for {IN_FLIGHT} of the largest.",
        f"At the worst moment {filled:.1%} of the arena's blocks in use were filled.",
        f"Times: medians (quartiles) of {options.rounds} turns; {torch.get_num_threads()} compute "
        "threads; the data set costs nothing. Ours seeds every batch, torch's does not.",
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
