"""Speculative decoding: several cheaply drafted tokens are verified in one forward.

    gulliver.LLM("folder", speculation="ngram").generate(...)

The output distribution does not depend on the drafts. Start with `proposers.py` and
`speculator.py`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.speculative.proposers import Proposer as Proposer
    from gulliver.serve.speculative.report import measure_draft as measure_draft
    from gulliver.serve.speculative.speculator import AcceptanceRate as AcceptanceRate
    from gulliver.serve.speculative.speculator import GuessChoice as GuessChoice
    from gulliver.serve.speculative.speculator import SpeculationOptions as SpeculationOptions
    from gulliver.serve.speculative.speculator import Speculator as Speculator
    from gulliver.serve.speculative.speculator import make_speculator as make_speculator
    from gulliver.serve.speculative.train_config import TrainDraftConfig as TrainDraftConfig

__getattr__, __dir__ = lazy_exports(__name__)
