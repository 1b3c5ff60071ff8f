"""Teaching a model one subject from a few pictures, with its own token (DreamBooth).

The names are those of `public.py`; they are imported when the first of them is asked for, so that
the options in `_config.py` can be read without torch. Read `_base.py` (what is asked of a model),
`trainer.py` (the recipe), `_words.py` (what prompts say), `student.py` (samples and their
weights), `student.py` (what learns); `diffusers_base.py` with `noise.py` and `_noise.py` are the
bases of diffusers.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.dreambooth.base import Learnt
    from gulliver.dreambooth.config import DreamboothConfig
    from gulliver.jobs.loop import Outcome

__all__ = ["DreamboothConfig", "Learnt", "Outcome"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.dreambooth.base": ["Learnt"],
        "gulliver.dreambooth.config": ["DreamboothConfig"],
        "gulliver.jobs.loop": ["Outcome"],
    },
)
