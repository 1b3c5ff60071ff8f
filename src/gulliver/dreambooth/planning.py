"""Plans a run before weights are read: the largest micro-batch that fits.

A step is traced with shapes only, with the base model on meta. Seconds are not predicted, because
the cost model does not cover convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.dreambooth.config import DreamboothConfig
from gulliver.dreambooth.student import SubjectModel, make_optimizer, make_student
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
"""Default share of host memory for a GPU with a memory limit, if no disk is given."""
FIRST_USE = 16 << 20
"""Bytes to reserve for first-use allocations of libraries, for any model: 6 to 8 MiB for a
step's kernels and optimizer and 11 MiB for a save, plus a relative margin.
"""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def precision_of(config: DreamboothConfig, device: str) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bf16" if device == "cuda" else "fp32"


def make_plugin(config: DreamboothConfig, precision: str, ranks: int) -> Plugin:
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
            "--plugin ddp does not support float32 master weights for bf16; use --plugin zero1 or "
            "--dtype fp32"
        )
    return LowLevelZeroPlugin(1 if ranks > 1 else 2, CHUNK_MB, precision=half, verbose=False)


def plan_run(config: DreamboothConfig, plugin: Plugin, base: Any, ranks: int) -> PlannedRun:
    """Plans a run without loading weights or starting ranks."""
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
        raise GulliverError(
            f"{refusal}, including {size_text(FIRST_USE)} for libraries"
        ) from refusal
    raise refusal


def with_first_use(work: Work) -> Work:
    """Adds the first-use allocations of libraries to the predicted memory of a step."""
    # A small model would otherwise fit its limit in the plan and exceed it because of them.
    peaks = {
        name: peak + FIRST_USE
        for name in ("peak", "peak_recomputed", "peak_offloaded")
        if (peak := getattr(work, name)) or name == "peak"
    }
    # Blocks are chosen to fit together with everything outside of them, which is last.
    outside = [replace(block, saved=block.saved + FIRST_USE) for block in work.blocks[-1:]]
    return replace(work, **peaks, blocks=(*work.blocks[:-1], *outside))


def per_step(config: DreamboothConfig) -> int:
    return config.batch_size * (2 if config.priors else 1)


def _splits(config: DreamboothConfig, ranks: int) -> Iterator[tuple[int, int]]:
    """Yields micro-batch sizes and counts, fewest micro-batches first."""
    each = -(-per_step(config) // ranks)
    size = min(config.micro_batch or each, each)
    while True:
        yield size, -(-each // size)
        if size == 1 or config.micro_batch is not None:
            return
        size = -(-size // 2)


def _sample(config: DreamboothConfig, base: Any, size: int) -> dict[str, Any]:
    return {
        "latents": base.example(size),
        "texts": [config.filled(config.prompt)] * size,
        "generators": [torch.Generator() for _ in range(size)],
        "weights": [1.0] * size,
    }


def _work(student: SubjectModel, sample: dict[str, Any], activations: str) -> Work:
    kept = activation_peak(student, (), sample)
    size = len(sample["weights"])
    work = Work(samples=size, peak=kept.bytes or 0, unfollowed=kept.reason)
    if activations == "keep" or kept.bytes is None:
        return work
    again = activation_peak(student, (), sample, prepare=recompute_blocks)
    return replace(work, peak_recomputed=again.bytes or 0)


def recompute_blocks(student: Any) -> None:
    recompute_modules(student, recomputable_blocks(student))


def lines_of(planned: PlannedRun, size: int, side: str) -> list[str]:
    first = FIRST_USE if planned.plan.limited and planned.activations else 0
    *found, _ = replace(planned, activations=planned.activations - first).lines(1)
    if first:
        place = next(n for n, line in enumerate(found) if "activations" in line)
        found.insert(place + 1, f"  libraries        {size_text(first):>12} on first use")
    again = ["  blocks are recomputed in backward"] if planned.recompute else []
    return [f"micro-batches of {size} {side}", *found, *again]
