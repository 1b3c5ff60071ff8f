"""Pure algorithms on plain numbers: no torch, no files, no clocks."""

from gulliver.solve._chain import ChainPartition, chain_times, partition_chain
from gulliver.solve._extents import PAGE, Extents, size_class
from gulliver.solve._timeline import StepTimes, step_seconds
from gulliver.solve._unimodal import geometric_sizes

__all__ = [
    "PAGE",
    "ChainPartition",
    "Extents",
    "StepTimes",
    "chain_times",
    "geometric_sizes",
    "partition_chain",
    "size_class",
    "step_seconds",
]
