"""Text-to-video: training, generation, evaluation, and the demonstration of all three.

The names are those of `_public.py`; they are imported when the first of them is asked for, so that
the options in `_config.py` can be read without torch.
"""

from typing import TYPE_CHECKING, Any

from gulliver.video._config import SamplingConfig as SamplingConfig
from gulliver.video._encode_config import EncodeConfig as EncodeConfig

if TYPE_CHECKING:
    from gulliver.video._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(name)
    from gulliver.video import _public

    return getattr(_public, name)


def __dir__() -> list[str]:
    from gulliver.video import _public

    return [*globals(), *_public.__all__]
