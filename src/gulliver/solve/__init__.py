"""Pure algorithms on plain numbers: no torch, no files, no clocks."""

from gulliver.solve._timeline import StepTimes, step_seconds
from gulliver.solve._unimodal import geometric_sizes

__all__ = ["StepTimes", "geometric_sizes", "step_seconds"]
