"""Fine-tuning of language models: texts to batches, and the run that learns from them.

The names are those of `_public.py`; they are imported when the first of them is asked for, so that
the options in `_config.py` can be read without torch. The data half, in the order that texts take:
`_rows.py` (files to rows), `_forms.py` (what a row says), `_chat.py` and `_encode.py` (tokens, and
which of them are learnt), `_texts.py` (the whole data set), `_batches.py` (its order and batches)
and `_documents.py` (for which models packed batches are exact).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.finetune._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(name)
    if name in ("DataConfig", "check_data"):
        # Options: other commands have them too, and read them without torch.
        from gulliver.finetune import _config

        return getattr(_config, name)
    from gulliver.finetune import _public

    return getattr(_public, name)


def __dir__() -> list[str]:
    from gulliver.finetune import _public

    return [*globals(), *_public.__all__]
