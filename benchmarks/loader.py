"""The data loader: time per batch next to torch's DataLoader, in turns.

`benchmarks.gpu` measures both on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.utils import data as torch_data

from benchmarks._harness import Report, Spread, alternate, finish
from gulliver.data import DataLoader


@dataclass(frozen=True)
class Options:
    """Options of the loader benchmark."""

    rounds: int = 5  # Turns of each contestant
    threads: int = 1  # Torch's compute threads; 0: as it finds them
    keep: bool = False  # Write the result file


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


def overhead(rounds: int) -> dict[str, tuple[Spread, Spread]]:
    """Time per batch of torch's loader and of ours."""
    found = {}
    for name, numel, workers, length in (
        ("2 KiB, no workers", 64, 0, 4000),
        ("2 KiB, 2 workers", 64, 2, 4000),
        ("16 MiB, 2 workers", 2**19, 2, 240),
    ):
        data = Ready(torch.ones(numel), length)
        options: dict[str, Any] = {"batch_size": 8, "num_workers": workers}
        makes: dict[str, Callable[[], Any]] = {
            "torch": lambda d=data, o=options: torch_data.DataLoader(d, **o),
            "ours": lambda d=data, o=options: DataLoader(d, **o),
        }
        times = alternate({key: per_batch(make) for key, make in makes.items()}, rounds)
        found[name] = (times["torch"], times["ours"])
    return found


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.threads:
        torch.set_num_threads(options.threads)
    report = Report(
        "loader", "Data loader: time per batch", ("", "Gulliver", "torch", "ours / torch")
    )
    for name, (theirs, ours) in overhead(options.rounds).items():
        report.rows.append(
            (
                f"us per batch of {name}",
                ours.shown(".0f", 1e-6),
                theirs.shown(".0f", 1e-6),
                f"{ours.median / theirs.median:.2f}",
            )
        )
        report.figures[name] = {"s": ours.median, "torch_s": theirs.median}
    report.notes = [
        f"Medians (quartiles) of {options.rounds} turns; {torch.get_num_threads()} compute "
        "threads; the data set costs nothing. Ours seeds every batch, torch's does not."
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
