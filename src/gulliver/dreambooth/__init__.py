"""Teaching a model one subject from a few pictures, with its own token (DreamBooth).

The names are those of `_public.py`; they are imported when the first of them is asked for, so that
the options in `_config.py` can be read without torch. Read `_base.py` (what is asked of a model),
`_dreambooth.py` (the recipe), `_words.py` (what prompts say), `_order.py` (samples and their
weights), `_student.py` (what learns); `_diffusers.py` with `_kinds.py` and `_noise.py` are the
bases of diffusers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.dreambooth._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(name)
    from gulliver.dreambooth import _public

    return getattr(_public, name)


def __dir__() -> list[str]:
    from gulliver.dreambooth import _public

    return [*globals(), *_public.__all__]
