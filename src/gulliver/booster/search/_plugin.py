"""The plugin of a grid."""

from __future__ import annotations

from typing import Any

from gulliver.booster._gemini import GeminiPlugin
from gulliver.booster._hybrid_plugin import HybridParallelPlugin
from gulliver.booster._plugins import LowLevelZeroPlugin, Plugin
from gulliver.booster.search._grids import Grid
from gulliver.booster.search._offload_tiers import OffloadTiers
from gulliver.errors import GulliverError
from gulliver.plan import SHARED_BY_TENSOR

HALVES = ("bf16", "fp16")


def plugin_of(
    grid: Grid, precision: str = "fp32", limit: int = 0, behind: OffloadTiers | None = None
) -> Plugin:
    """The plugin that runs a grid."""
    half = precision if precision in HALVES else None
    axes, chunk = grid.axes, float(grid.chunk_mb) or "auto"
    limits: dict[str, Any] = {}
    if grid.offload:
        _check_offload(grid, limit)
        behind = behind or OffloadTiers()
        disk = None if behind.disk is None else f"{behind.disk}:{behind.disk_bytes}"
        limits = {"memory_limit": limit, "host_limit": behind.host or None, "disk": disk}
        if not axes.cuts_model:
            again = "recompute" if grid.recomputed else "keep"
            return GeminiPlugin(**limits, activations=again, precision=half, verbose=False)
        chunk = "auto"
    if not axes.cuts_model and not grid.recomputed:
        return LowLevelZeroPlugin(grid.stage, chunk, precision=half, verbose=False)
    line: dict[str, Any] = {}
    if axes.pipeline > 1:
        line = {"num_microbatches": grid.micro_batches, "pp_style": grid.schedule}
        if grid.chunks > 1:
            line["num_model_chunks"] = grid.chunks
    return HybridParallelPlugin(
        axes.tensor,
        axes.pipeline,
        axes.tensor if axes.mode in SHARED_BY_TENSOR else axes.sequence,
        axes.mode or None,
        zero_stage=grid.stage,
        precision=half,
        checkpoint_activations=grid.recomputed > 0,
        replicate_rest=axes.tensor > 1,
        chunk_mb=chunk,
        verbose=False,
        **limits,
        **line,
    )


def _check_offload(grid: Grid, limit: int) -> None:
    """Refuses offloading grids that no plugin can run."""
    if grid.stage != 3:
        raise GulliverError(
            f"{grid}: what is whole on every rank cannot leave its memory; off-load needs stage 3"
        )
    if grid.axes.pipeline == 1 and grid.micro_batches > 1:
        raise GulliverError(
            f"{grid}: what moves in backwards that accumulate is not planned; off-load needs 1 "
            "micro-batch, or a pipeline"
        )
    if limit < 1:
        raise GulliverError(f"{grid}: say how many bytes a rank may hold")
