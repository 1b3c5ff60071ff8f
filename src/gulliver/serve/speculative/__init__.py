"""Speculative decoding: tokens are guessed cheaply, and several are verified in one forward.

    gulliver.LLM("folder", speculation="ngram").generate(...)

Exact with any guesses: see `serve/_speculation.py`. Read `_proposal.py` (what a guesser gives),
`_lookup.py` (guesses without a model), `_cost.py` (what they are worth), `_speculator.py` (how many
are verified); `_model.py` over `_cache.py` (guesses by a model), `_small.py`, `_glide.py` with
`_glide_draft.py` (two kinds of models); `_target.py`, `_train.py` and `_report.py`. The names are
those of `_public.py`, imported when the first of them is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.serve.speculative._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(name)
    from gulliver.serve.speculative import _public

    return getattr(_public, name)


def __dir__() -> list[str]:
    from gulliver.serve.speculative import _public

    return [*globals(), *_public.__all__]
