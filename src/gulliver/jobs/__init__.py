"""What every long job has: progress, TensorBoard, a log, seeds, and an end by signal.

It does not know what a job computes, nor where its results lie.
"""

from gulliver.jobs._display import Display, Scalars, console, memory_in_use, tensorboard
from gulliver.jobs._log import Log
from gulliver.jobs._seeds import derive
from gulliver.jobs._stop import StopRequest

__all__ = [
    "Display",
    "Log",
    "Scalars",
    "StopRequest",
    "console",
    "derive",
    "memory_in_use",
    "tensorboard",
]
