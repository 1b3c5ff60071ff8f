"""DreamBooth: teaches a model one subject from a few images.

Start with `base.py` (the interface of a model) and `trainer.py` (the recipe).
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.dreambooth.base import TrainedParts as Learnt  # noqa: F401
    from gulliver.dreambooth.base import TrainedParts as TrainedParts
    from gulliver.dreambooth.config import DreamboothConfig as DreamboothConfig
    from gulliver.dreambooth.trainer import dreambooth as dreambooth
    from gulliver.jobs.loop import Outcome as Outcome

__getattr__, __dir__ = lazy_exports(__name__)
