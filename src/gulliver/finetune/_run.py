"""A run folder of fine-tuning, and what lies in it.

run/
  config.json          options, what was chosen, fingerprints of model and data
  plan.yaml            how the model ran
  log.jsonl            a line per logged step, and one per evaluation
  samples.jsonl        what the model made of prompts, at each evaluation
  tensorboard/
  checkpoints/step-*/  trained weights, optimizer, schedule, position in the data
  best/step-*/         the trained weights of the best evaluation
  adapter/, model/     the result, for PEFT and for transformers
  README.md            the model card
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from gulliver.checkpoint import CheckpointFolder, read_json, write_json
from gulliver.errors import GulliverError
from gulliver.finetune._job_config import MAY_CHANGE
from gulliver.io import named_errors, require_space
from gulliver.jobs import Log
from gulliver.options import differences, resolved

FINGERPRINTS = {
    "base": "--model is not the one that the run was begun with",
    "data": "--data, or what they are tokenized with, are not those that the run was begun with",
}

WRITTEN = ("result", "save_dtype")
"""Options that hold for a whole model as it is written."""


@dataclass(frozen=True)
class Run:
    """A folder with a fine-tuning run.

    Attributes:
        folder: folder of the run.
        keep: number of newest checkpoints kept.
        may_change: options that may differ where it is resumed.
        fingerprints: what is told where a fingerprint differs, by its name.
    """

    folder: Path
    keep: int = 2
    may_change: frozenset[str] = MAY_CHANGE
    fingerprints: Mapping[str, str] = field(default_factory=lambda: FINGERPRINTS)

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints of the run."""
        return CheckpointFolder(self.folder / "checkpoints", keep=self.keep)

    @property
    def best(self) -> CheckpointFolder:
        """The weights of the best evaluation."""
        return CheckpointFolder(self.folder / "best", keep=1)

    @property
    def log(self) -> Log:
        """The log of steps and evaluations."""
        return Log(self.folder / "log.jsonl")

    @property
    def samples(self) -> Log:
        """The log of samples."""
        return Log(self.folder / "samples.jsonl")

    @property
    def config_path(self) -> Path:
        """Options, choices and fingerprints."""
        return self.folder / "config.json"

    def values(self) -> dict[str, Any]:
        """What `write` has written; empty where there is no run."""
        return read_json(self.config_path) if self.config_path.is_file() else {}

    def open(self, config: Any, fingerprints: dict[str, str]) -> Path | None:
        """Finds what there is to go on from.

        Args:
            config: options of the run.
            fingerprints: digests of the model and the data, by the names of `fingerprints`.

        Returns:
            The newest checkpoint, or None.

        Raises:
            GulliverError: there is a run already and this is no resumption, or it is of other
                options, another model or other data.
        """
        newest, values = self.checkpoints.latest(), self.values()
        if not config.resume:
            if newest is not None:
                raise GulliverError(
                    f"{self.folder} already holds a run ({newest.name}): "
                    "add --resume to continue it, or choose another --out"
                )
            return None
        if not values:
            return None  # stopped before it began: what there is to continue is the start
        for name, told in self.fingerprints.items():
            if values["fingerprints"][name] != fingerprints[name]:
                raise GulliverError(
                    f"{self.folder} cannot be resumed: {told} (fingerprint "
                    f"{values['fingerprints'][name]}, here {fingerprints[name]})"
                )
        changed = differences(values["options"], resolved(config), self.may_change)
        if changed:
            raise GulliverError(
                f"{self.folder} cannot be resumed with other options: {'; '.join(changed)}"
            )
        self._check_written(values["options"], resolved(config))
        return newest

    def _check_written(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Refuses another result where there is one: a run that is over writes only what lacks."""
        changed = differences({k: old.get(k) for k in WRITTEN}, {k: new.get(k) for k in WRITTEN})
        whole = self.folder / "model"
        if changed and whole.is_dir():
            raise GulliverError(
                f"{whole} is written already, and {'; '.join(changed)}: move it away to have it "
                "written anew"
            )

    def check_writable(self, needed: int) -> None:
        """Refuses a folder that cannot be written to, or a disk that is too small for the run.

        Args:
            needed: bytes that checkpoints and result will take.

        Raises:
            GulliverError: naming the folder, and the bytes needed and free.
        """
        with named_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=self.folder):
                pass
        require_space(self.folder, needed)

    def write(self, **values: Any) -> None:
        """Saves options, choices and fingerprints."""
        write_json(self.config_path, values)

    def cut(self, step: int) -> None:
        """Drops what was logged after a step."""
        self.log.cut(step)
        self.samples.cut(step)
