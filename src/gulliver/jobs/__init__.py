"""Infrastructure shared by long jobs: progress, logs, seeds, stopping by signal.

The training loop and its run folder, which import torch, are in `loop.py` and `run_folder.py`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.jobs.loop import Outcome as Outcome

__getattr__, __dir__ = lazy_exports(__name__)
