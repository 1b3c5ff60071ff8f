"""How a run lies on its ranks, known before a weight is read: the largest micro-batch that fits.

A base on meta learns as the real one will; what a step takes is followed with shapes alone.
Seconds are not predicted: those of convolutions would be guesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.dreambooth.config import DreamboothConfig
from gulliver.dreambooth.student import Student, make_optimizer, make_student
from gulliver.errors import GulliverError
from gulliver.finetune.planning import PlannedRun, fitting
from gulliver.hardware.probe import current_cluster
from gulliver.memory.activations import recompute_modules
from gulliver.memory.symbolic import activation_peak
from gulliver.options import size_text
from gulliver.plan.tree import Work
from gulliver.planner.measure import estimate_sample, with_peaks
from gulliver.planner.model import recomputable_blocks

CHUNK_MB = 4.0
HOST_SHARE = "70%"
"""Share of the host's memory behind a GPU with a limit, where no disk is named."""
FIRST_USE = 16 << 20
"""Bytes under a limit that do not depend on the model: what libraries take at their first use, 6 to
8 MiB of a step's kernels and optimizer and 11 of a save, with the share that is added to it."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def precision_of(config: DreamboothConfig, device: str) -> str:
    """The dtype of training: bf16 on a GPU, where none is asked for."""
    if config.dtype != "auto":
        return config.dtype
    return "bf16" if device == "cuda" else "fp32"


def make_plugin(config: DreamboothConfig, precision: str, ranks: int) -> Plugin:
    """The plugin that says how the ranks share the work."""
    half = "bf16" if precision == "bf16" else None
    if config.memory_limit is not None:
        limit: dict[str, Any] = {"memory_limit": config.memory_limit, "disk": config.disk}
        if config.disk is None and torch.cuda.is_available():
            limit["host_limit"] = HOST_SHARE
        activations = config.activations
        return GeminiPlugin(**limit, precision=half, activations=activations, verbose=False)
    if config.plugin.startswith("zero"):
        stage = int(config.plugin.removeprefix("zero"))
        return LowLevelZeroPlugin(stage, CHUNK_MB, precision=half, verbose=False)
    if half is None:
        return TorchDDPPlugin(verbose=False)
    if config.plugin == "ddp":
        raise GulliverError(
            "--plugin ddp trains no float32 copies of bf16 weights: take --plugin zero1, or "
            "--precision fp32"
        )
    return LowLevelZeroPlugin(1 if ranks > 1 else 2, CHUNK_MB, precision=half, verbose=False)


def plan_run(config: DreamboothConfig, plugin: Plugin, base: Any, ranks: int) -> PlannedRun:
    """Plans a run; nothing is loaded, and no ranks need to be there."""
    student, _ = make_student(base, config, [""])
    optimizer, cluster = make_optimizer(student, config), current_cluster(ranks)
    refusal = GulliverError("")
    for size, times in _splits(config, ranks):
        sample = _sample(config, base, size)
        if config.memory_limit is None:
            work = _work(student, sample, config.activations)
        else:
            estimated = estimate_sample(student, optimizer, sample, "none")
            work = with_peaks(estimated, student, sample, None, config.activations)
            work = with_first_use(work)
        try:
            plan = plugin.make_plan(student, optimizer, cluster, work=work)
            return fitting(config, plan, ranks, times)
        except GulliverError as error:
            refusal = error
    if "smallest limit" in str(refusal):
        raise GulliverError(f"{refusal}, {size_text(FIRST_USE)} of it for libraries") from refusal
    raise refusal


def with_first_use(work: Work) -> Work:
    """Work of a step that keeps what libraries take at their first use."""
    # A small model's limit would be held by the plan and exceeded by them.
    peaks = {
        name: peak + FIRST_USE
        for name in ("peak", "peak_recomputed", "peak_offloaded")
        if (peak := getattr(work, name)) or name == "peak"
    }
    # Blocks are chosen for so that they fit together with what is outside of them, the last one.
    outside = [replace(block, saved=block.saved + FIRST_USE) for block in work.blocks[-1:]]
    return replace(work, **peaks, blocks=(*work.blocks[:-1], *outside))


def per_step(config: DreamboothConfig) -> int:
    """Samples of a step, over all ranks."""
    return config.batch_size * (2 if config.priors else 1)


def _splits(config: DreamboothConfig, ranks: int) -> Iterator[tuple[int, int]]:
    """Samples of a micro-batch and numbers of micro-batches, the fewest first."""
    each = -(-per_step(config) // ranks)
    size = min(config.micro_batch or each, each)
    while True:
        yield size, -(-each // size)
        if size == 1 or config.micro_batch is not None:
            return
        size = -(-size // 2)


def _sample(config: DreamboothConfig, base: Any, size: int) -> dict[str, Any]:
    """The arguments of the student for a micro-batch, without values."""
    return {
        "latents": base.example(size),
        "texts": [config.filled(config.prompt)] * size,
        "generators": [torch.Generator() for _ in range(size)],
        "weights": [1.0] * size,
    }


def _work(student: Student, sample: dict[str, Any], activations: str) -> Work:
    """What a micro-batch takes of memory, with and without its blocks' activations."""
    kept = activation_peak(student, (), sample)
    size = len(sample["weights"])
    work = Work(samples=size, peak=kept.bytes or 0, unfollowed=kept.reason)
    if activations == "keep" or kept.bytes is None:
        return work
    again = activation_peak(student, (), sample, prepare=recompute_blocks)
    return replace(work, peak_recomputed=again.bytes or 0)


def recompute_blocks(student: Any) -> None:
    """Lets backward compute the blocks of a student again."""
    recompute_modules(student, recomputable_blocks(student))


def lines_of(planned: PlannedRun, size: int, side: str) -> list[str]:
    """Lines for people: memory by kind and tier."""
    first = FIRST_USE if planned.plan.limited and planned.activations else 0
    *found, _ = replace(planned, activations=planned.activations - first).lines(1)
    if first:
        place = next(n for n, line in enumerate(found) if "activations" in line)
        found.insert(place + 1, f"  libraries        {size_text(first):>12} at their first use")
    again = ["  blocks are computed again in backward"] if planned.recompute else []
    return [f"micro-batches of {size} {side}", *found, *again]
