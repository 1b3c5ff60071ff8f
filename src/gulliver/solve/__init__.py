"""Pure algorithms on plain numbers: no torch, no files, no clocks."""

from gulliver.solve._extents import PAGE, Extents, size_class
from gulliver.solve._timeline import StepTimes, step_seconds
from gulliver.solve._unimodal import geometric_sizes

__all__ = ["PAGE", "Extents", "StepTimes", "geometric_sizes", "size_class", "step_seconds"]
