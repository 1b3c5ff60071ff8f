"""FP8 training: final losses compared with float32's, and speed on a GPU.

``--parts gpu`` is one command of nine minutes at most on a GPU with FP8 units; the others run on
CPUs, where FP8 is emulated, and say nothing of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from benchmarks._fp8_gpu import report_gpu
from benchmarks._fp8_training import ARMS, final, gpt_losses, stdit_losses
from benchmarks._harness import Report, at_most, finish

NEAR = 0.01  # Distance of a final loss from float32's


@dataclass(frozen=True)
class Options:
    """Options: parts and sizes that are measured."""

    parts: tuple[Literal["convergence", "gpu"], ...] = ("convergence",)
    """Parts, in this order."""
    steps: int = 120  # Steps of each training
    seeds: int = 3  # Seeds of each training
    rounds: int = 7  # Turns of each contestant on the GPU
    threads: int = 0  # Threads of torch; 0: as it finds them
    keep: bool = False  # Write the result file


def report_convergence(options: Options, report: Report) -> None:
    """Final losses of both trainings in every format, means over the seeds."""
    trainings: dict[str, Callable[[str, int, int], list[float]]] = {
        "GPT on Python sources": gpt_losses,
        "STDiT on moving digits": stdit_losses,
    }
    for name, train in trainings.items():
        found = {
            arm: [train(arm, seed, options.steps) for seed in range(options.seeds)] for arm in ARMS
        }
        plain = sum(map(final, found["fp32"])) / options.seeds
        for arm, runs in found.items():
            mean = sum(map(final, runs)) / options.seeds
            apart = mean / plain - 1
            shown = (f"{mean:.4f}", f"{100 * apart:+.2f} %", f"{options.seeds} seeds")
            report.rows.append((f"{name}, {arm}", *shown))
            report.figures[f"{name}, {arm}"] = [final(run) for run in runs]
            if arm != "fp32":
                report.bars.append(at_most(f"{name}, {arm}: final loss apart", abs(apart), NEAR))


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.threads:
        torch.set_num_threads(options.threads)
    if "gpu" in options.parts:
        report = Report("fp8-gpu", "FP8 on a GPU", ("what", "arm", "ms", "gain", "predicted"))
        report_gpu(options.rounds, report)
        finish(report, options.keep)
    if "convergence" in options.parts:
        columns = ("training", "final loss", "apart", "seeds")
        report = Report("fp8", "FP8, emulated on a CPU: final losses", columns)
        report_convergence(options, report)
        report.notes.append("FP8 is emulated: the same numerics, and nothing said of speed.")
        finish(report, options.keep)


if __name__ == "__main__":
    main()
