"""Loss curves of four ranks whose gradients and parameters travel packed, beside float32's."""

from __future__ import annotations

from typing import Any

from benchmarks._fp8_training import final, gpt_losses, stdit_losses
from benchmarks._harness import Report, at_least, at_most
from benchmarks.netlab import run
from gulliver.booster import LowLevelZeroPlugin
from gulliver.comm import init_world
from gulliver.errors import GulliverError

RANKS = 4
NEAR = 0.01  # Distance of a final loss from float32's
TRAININGS = {"GPT on Python sources": gpt_losses, "STDiT on moving digits": stdit_losses}
ARMS: dict[str, tuple[int, Any]] = {
    "fp32": (2, None),
    "fp8": (2, "fp8"),
    "int8": (2, "int8"),
    "int8 with feedback": (2, "int8"),
    "fp8, stage 3": (3, "fp8"),
}
HARMFUL = "int4:1024"


def plugin_of(stage: int, wire: Any, feedback: bool = False) -> LowLevelZeroPlugin:
    """ZeRO with gradients and parameters in a format."""
    packed = {"communication_dtype": wire, "force_communication_dtype": True}
    options: dict[str, Any] = {} if wire is None else packed | {"error_feedback": feedback}
    return LowLevelZeroPlugin(stage, 1, max_norm=1.0, verbose=False, **options)


def losses_of(training: str, arm: str, seeds: int, steps: int) -> list[list[float]]:
    """Losses of each seed; every rank calls it."""
    init_world()
    stage, wire = ARMS[arm]
    plugins = [plugin_of(stage, wire, "feedback" in arm) for _ in range(seeds)]
    train = TRAININGS[training]
    return [train("fp32", seed, steps, plugin=plugin) for seed, plugin in enumerate(plugins)]


def stopped(training: str, steps: int) -> str:
    """What the gate says of a format that harms; every rank calls it."""
    init_world()
    try:
        TRAININGS[training]("fp32", 0, steps, plugin=plugin_of(2, {"reduce": HARMFUL}))
    except GulliverError as error:
        return str(error)
    return ""


def report_convergence(report: Report, seeds: int, steps: int) -> None:
    """Final losses in every format, means over the seeds."""
    for name in TRAININGS:
        plain = 0.0
        for arm in ARMS:
            runs = run(losses_of, None, name, arm, seeds, steps, ranks=RANKS)[0]
            mean = sum(map(final, runs)) / seeds
            plain = plain or mean
            apart = mean / plain - 1
            shown = (f"{mean:.4f}", f"{100 * apart:+.2f} %", f"{seeds} seeds")
            report.rows.append((name, arm, *shown))
            report.figures[f"{name}, {arm}"] = [final(one) for one in runs]
            if arm != "fp32":
                report.bars.append(at_most(f"{name}, {arm}: final loss apart", abs(apart), NEAR))
        told = run(stopped, None, name, steps, ranks=RANKS)[0]
        report.notes.append(f"{name}, gradients in {HARMFUL} without feedback: {told or 'trained'}")
        caught = float(bool(told))
        report.bars.append(at_least(f"{name}, {HARMFUL}: caught by the gate", caught, 1.0))
