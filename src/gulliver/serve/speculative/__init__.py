"""Speculative decoding: tokens are guessed cheaply, and several are verified in one forward.

    gulliver.LLM("folder", speculation="ngram").generate(...)

Exact with any guesses: see `serve/batch.py`. Read `proposers.py` (what a guesser gives),
`_lookup.py` (guesses without a model), `cost.py` (what they are worth), `speculator.py` (how many
are verified); `_model.py` over `_cache.py` (guesses by a model), `small_model.py`, `glide.py` with
`glide.py` (two kinds of models); `train.py`, `_train.py` and `_report.py`. The names are
those of `public.py`, imported when the first of them is asked for.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.speculative.cost import AcceptanceRate, GuessChoice
    from gulliver.serve.speculative.proposers import Proposer
    from gulliver.serve.speculative.report import Load, measure_draft
    from gulliver.serve.speculative.speculator import (
        SpeculationOptions,
        Speculator,
        make_speculator,
    )
    from gulliver.serve.speculative.train_config import TrainDraftConfig

__all__ = [
    "AcceptanceRate",
    "GuessChoice",
    "Load",
    "Proposer",
    "SpeculationOptions",
    "Speculator",
    "TrainDraftConfig",
    "make_speculator",
    "measure_draft",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.serve.speculative.cost": ["AcceptanceRate", "GuessChoice"],
        "gulliver.serve.speculative.proposers": ["Proposer"],
        "gulliver.serve.speculative.report": ["Load", "measure_draft"],
        "gulliver.serve.speculative.speculator": [
            "SpeculationOptions",
            "Speculator",
            "make_speculator",
        ],
        "gulliver.serve.speculative.train_config": ["TrainDraftConfig"],
    },
)
