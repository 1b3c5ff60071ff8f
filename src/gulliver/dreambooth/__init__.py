"""DreamBooth: teaches a model one subject from a few images.

Start with `base.py` (the interface of a model) and `trainer.py` (the recipe).
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.dreambooth.base import TrainedParts
    from gulliver.dreambooth.base import TrainedParts as Learnt  # noqa: F401
    from gulliver.dreambooth.config import DreamboothConfig
    from gulliver.dreambooth.trainer import dreambooth
    from gulliver.jobs.loop import Outcome

__all__ = ["DreamboothConfig", "Outcome", "TrainedParts", "dreambooth"]

__getattr__, __dir__ = lazy_exports(__name__)
