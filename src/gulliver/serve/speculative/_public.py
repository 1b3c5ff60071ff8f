"""The public names of `gulliver.serve.speculative`, imported when one of them is asked for."""

from gulliver.serve.speculative._cost import AcceptanceRate, GuessChoice, StepCost, best
from gulliver.serve.speculative._folder import is_draft, load_draft, save_draft
from gulliver.serve.speculative._glide import Glide, GlideConfig, seen_keys
from gulliver.serve.speculative._glide_draft import GlideDraft
from gulliver.serve.speculative._lookup import Followers, LookUp
from gulliver.serve.speculative._make import make_speculator
from gulliver.serve.speculative._model import CAPE, ModelDraft
from gulliver.serve.speculative._proposal import Proposal, Proposer
from gulliver.serve.speculative._report import (
    Load,
    SpeculationReport,
    measure_draft,
    report,
)
from gulliver.serve.speculative._small import SmallModel
from gulliver.serve.speculative._speculator import SpeculationOptions, Speculator
from gulliver.serve.speculative._target import glimpses_of, target_frequencies
from gulliver.serve.speculative._train import Trained, glide_config, train_draft
from gulliver.serve.speculative._train_config import (
    ReportConfig,
    SpeculateConfig,
    TrainDraftConfig,
    check_train_draft,
)

__all__ = [
    "CAPE",
    "AcceptanceRate",
    "Followers",
    "Glide",
    "GlideConfig",
    "GlideDraft",
    "GuessChoice",
    "Load",
    "LookUp",
    "ModelDraft",
    "Proposal",
    "Proposer",
    "ReportConfig",
    "SmallModel",
    "SpeculateConfig",
    "SpeculationOptions",
    "SpeculationReport",
    "Speculator",
    "StepCost",
    "TrainDraftConfig",
    "Trained",
    "best",
    "check_train_draft",
    "glide_config",
    "glimpses_of",
    "is_draft",
    "load_draft",
    "make_speculator",
    "measure_draft",
    "report",
    "save_draft",
    "seen_keys",
    "target_frequencies",
    "train_draft",
]
