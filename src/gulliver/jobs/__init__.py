"""What every long job has: progress, a log, seeds, an end by signal.

The training loop and its run folder, which import torch, are in `_loop.py` and `_run_folder.py`.
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
