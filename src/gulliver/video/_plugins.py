"""Plugins of a training run: how its ranks share the model and the optimizer."""

from __future__ import annotations

from gulliver.booster import (
    DataCentricPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
)
from gulliver.booster.hybrid import size_axes
from gulliver.video._config import TrainConfig

CHUNK_MB = 1.0


def check_ranks(config: TrainConfig, ranks: int) -> None:
    """Refuses ranks that do not make whole models."""
    size_axes(ranks, config.pp_size, config.sp_size, config.tp_size)


def make_plugin(config: TrainConfig) -> Plugin:
    """Makes the plugin that says how the ranks share the work."""
    # Steps of many shapes take many times, which tuning would take for its own doing.
    if config.data_centric:
        mode = config.sequence_parallelism_mode or "all_to_all"
        inside = {"tp_size": config.tp_size, "pp_size": config.pp_size}
        return DataCentricPlugin(config.stage, mode, chunk_mb=CHUNK_MB, **inside)
    if config.ranks_of_a_model > 1:
        mode = config.sequence_parallelism_mode or "all_to_all"
        return HybridParallelPlugin(
            tp_size=config.tp_size,
            sp_size=config.sp_size,
            pp_size=config.pp_size,
            num_microbatches=config.micro_batches if config.pp_size > 1 else None,
            sequence_parallelism_mode=mode if config.sp_size > 1 else None,
            zero_stage=config.stage,
            chunk_mb=CHUNK_MB,
        )
    if config.plugin == "zero":
        return LowLevelZeroPlugin(stage=config.stage, chunk_mb=CHUNK_MB)
    return TorchDDPPlugin()
