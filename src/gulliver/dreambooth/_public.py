"""The public names of `gulliver.dreambooth`, imported when one of them is asked for."""

from gulliver.dreambooth._base import Base, Learnt, Picture, TokenHandle
from gulliver.dreambooth._config import DreamboothConfig, check_dreambooth
from gulliver.dreambooth._diffusers import DiffusersBase
from gulliver.dreambooth._dreambooth import dreambooth
from gulliver.dreambooth._video import VideoBase, load_adapter
from gulliver.jobs._loop import Outcome

__all__ = [
    "Base",
    "DiffusersBase",
    "DreamboothConfig",
    "Learnt",
    "Outcome",
    "Picture",
    "TokenHandle",
    "VideoBase",
    "check_dreambooth",
    "dreambooth",
    "load_adapter",
]
