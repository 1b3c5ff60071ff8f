"""FP8 training: errors against float64, loss curves beside float32's, and speed on a GPU.

``--parts gpu`` is one command of nine minutes at most on a GPU with FP8 units; the others run on
CPUs, where FP8 is emulated, and say nothing of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from torch import Tensor

from benchmarks._fp8_gpu import report_gpu
from benchmarks._fp8_training import ARMS, final, gpt_losses, stdit_losses
from benchmarks._harness import Report, at_most, finish
from gulliver.precision.fp8 import linear
from gulliver.precision.fp8.layers import (
    FORWARD,
    GRADIENT,
    LayerState,
    Recipe,
    Scaled,
    encode,
    magnitude,
    matmul,
)

CAST_BARS = {FORWARD: 0.028, GRADIENT: 0.056}
NEAR = 0.01  # Distance of a final loss from float32's


@dataclass(frozen=True)
class Options:
    """Options: parts and sizes that are measured."""

    parts: tuple[Literal["numerics", "convergence", "gpu"], ...] = ("numerics", "convergence")
    """Parts, in this order."""
    steps: int = 120  # Steps of each training
    seeds: int = 3  # Seeds of each training
    rounds: int = 7  # Turns of each contestant on the GPU
    threads: int = 0  # Threads of torch; 0: as it finds them
    keep: bool = False  # Write the result file


def inputs(kind: str, *shape: int, seed: int) -> Tensor:
    """Normal numbers; with outliers in every 61st column; or so tiny that float32 ends soon."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if kind == "outliers":
        x[:, ::61] *= 50.0
    return x * 1e-30 if kind == "tiny" else x


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative error in the Frobenius norm."""
    return float((found.detach().double() - wanted).norm() / wanted.norm())


def report_numerics(report: Report) -> None:
    """Errors of casts and of a layer's three products against float64, and of the emulation."""
    for kind in ("normal", "outliers", "tiny"):
        x, w = inputs(kind, 512, 512, seed=0), inputs("normal", 256, 512, seed=1)
        g = inputs("normal", 512, 256, seed=2)
        for dtype, bar in CAST_BARS.items():
            found = error(encode(x, magnitude(x), dtype).decoded(torch.float64), x.double())
            name = f"cast to {str(dtype).removeprefix('torch.')}, {kind}"
            report.rows.append((name, f"{100 * found:.2f} %", "", ""))
            report.bars.append(at_most(name, found, bar))
        for scaling in ARMS[1:]:
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = linear(a, b, None, LayerState(Recipe(scaling, emulate=True)))
            y.backward(g)
            x64, w64, g64 = x.double(), w.double(), g.double()
            pairs = ((y, x64 @ w64.T), (a.grad, g64 @ w64), (b.grad, g64.T @ x64))
            errors = [error(one, other) for one, other in pairs if one is not None]
            name = f"layer, {scaling}, {kind}"
            report.rows.append((name, *(f"{100 * e:.2f} %" for e in errors)))
            report.figures[name] = errors
    report.bars.append(at_most("emulation: elements unlike torch's product", _unlike(), 0.0))


def _unlike() -> float:
    """Share of elements of which the emulation and torch's own FP8 product differ."""
    x, w = inputs("outliers", 512, 512, seed=3), inputs("normal", 256, 512, seed=4)
    a, b = encode(x, magnitude(x), GRADIENT), encode(w, magnitude(w), FORWARD).t()
    mine = matmul(a, b, torch.float32, emulate=True)
    return float((mine != matmul(Scaled(*a), b, torch.float32, emulate=False)).float().mean())


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
    if set(options.parts) - {"gpu"}:
        columns = ("what", "forward, or loss", "input gradient, or apart", "weight gradient")
        report = Report("fp8", "FP8, emulated on a CPU: errors and final losses", columns)
        if "numerics" in options.parts:
            report_numerics(report)
        if "convergence" in options.parts:
            report_convergence(options, report)
        report.notes.append("FP8 is emulated: the same numerics, and nothing said of speed.")
        finish(report, options.keep)


if __name__ == "__main__":
    main()
