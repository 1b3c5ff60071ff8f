"""The folder of a fine-tuning run: what every run has, the best weights, and the result.

run/
  ...                  see `gulliver.jobs.RunFolder`
  best/step-*/         the trained weights of the best evaluation
  adapter/, model/     the result, for PEFT and for transformers
  README.md            the model card
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gulliver.checkpoint import CheckpointFolder
from gulliver.errors import GulliverError
from gulliver.finetune._job_config import MAY_CHANGE
from gulliver.jobs._run_folder import RunFolder
from gulliver.options import differences, resolved

FINGERPRINTS = {
    "base": "--model is not the one that the run was begun with",
    "data": "--data or the tokenizer is not the one that the run was begun with",
}

WRITTEN = ("result", "save_dtype")
"""Options that hold for a whole model as it is written."""


@dataclass(frozen=True)
class FinetuneRun(RunFolder):
    """A folder with a fine-tuning run."""

    may_change: frozenset[str] = MAY_CHANGE
    fingerprints: Mapping[str, str] = field(default_factory=lambda: FINGERPRINTS)

    @property
    def best(self) -> CheckpointFolder:
        """The weights of the best evaluation."""
        return CheckpointFolder(self.folder / "best", keep=1)

    def open(
        self, config: Any, fingerprints: Mapping[str, str] | None = None, step: int | None = None
    ) -> Path | None:
        newest = super().open(config, fingerprints, step)
        whole = self.folder / "model"
        if newest is not None and whole.is_dir():
            # A run that is over writes only what is missing, so other options would do nothing.
            old, new = self.options(), resolved(config)
            changed = differences({k: old[k] for k in WRITTEN}, {k: new[k] for k in WRITTEN})
            if changed:
                raise GulliverError(
                    f"{whole} is written already, and {'; '.join(changed)}: move it away to have "
                    "it written again"
                )
        return newest
