"""Speculative decoding: several cheaply drafted tokens are verified in one forward.

    gulliver.LLM("folder", speculation="ngram").generate(...)

The output distribution does not depend on the drafts. Start with `proposers.py` and
`speculator.py`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.speculative.proposers import Proposer
    from gulliver.serve.speculative.report import measure_draft
    from gulliver.serve.speculative.speculator import (
        AcceptanceRate,
        GuessChoice,
        SpeculationOptions,
        Speculator,
        make_speculator,
    )
    from gulliver.serve.speculative.train_config import TrainDraftConfig

__all__ = [
    "AcceptanceRate",
    "GuessChoice",
    "Proposer",
    "SpeculationOptions",
    "Speculator",
    "TrainDraftConfig",
    "make_speculator",
    "measure_draft",
]

__getattr__, __dir__ = lazy_exports(__name__)
