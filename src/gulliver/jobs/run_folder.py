"""Folder of a training run: options, log, checkpoints, and checks before resuming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from gulliver.checkpoint.files import read_json, write_json
from gulliver.checkpoint.folder import CheckpointFolder
from gulliver.checkpoint.loading import step_folder
from gulliver.errors import GulliverError
from gulliver.io.files import named_errors, require_space
from gulliver.jobs.log import Log
from gulliver.jobs.trackers import check_trackers
from gulliver.options import differences, resolved, with_new_names


@dataclass(frozen=True)
class RunFolder:
    """Folder of a training run."""

    # run/
    #   config.json          resolved options, fingerprints of model and data
    #   plan.yaml            how the model ran
    #   log.jsonl            a line per logged step, and one per evaluation
    #   samples.jsonl        outputs of the model at evaluations
    #   tensorboard/
    #   checkpoints/step-*/  model, optimizer, schedule, position in the data

    # Path of the folder.
    folder: Path
    # Number of newest checkpoints that are kept.
    keep: int = 2
    # Options that may differ when the run is resumed.
    may_change: frozenset[str] = frozenset()
    # Message for each fingerprint that must not change, by its name.
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.folder / "checkpoints", keep=self.keep)

    @property
    def log(self) -> Log:
        return Log(self.folder / "log.jsonl")

    @property
    def samples(self) -> Log:
        return Log(self.folder / "samples.jsonl")

    @property
    def config_path(self) -> Path:
        return self.folder / "config.json"

    def values(self) -> dict[str, Any]:
        """Returns the values written by `write`; empty if there is no run."""
        return read_json(self.config_path) if self.config_path.is_file() else {}

    def options(self) -> dict[str, Any]:
        return self.values()["options"]

    def open(
        self, config: Any, fingerprints: Mapping[str, str] | None = None, step: int | None = None
    ) -> Path | None:
        check_trackers(getattr(config, "report_to", ()))
        newest = self.checkpoints.latest()
        if not config.resume:
            if newest is not None:
                raise GulliverError(
                    f"{self.folder} already holds a run ({newest.name}): add --resume to continue "
                    "it, or use another --out"
                )
            return None
        if step is not None:
            newest = step_folder(self.checkpoints.root, step)
        if newest is None:
            return None  # it was stopped before its first checkpoint, so it starts again
        known = self.values().get("fingerprints", {})
        for name, message in self.fingerprints.items():
            here = (fingerprints or {})[name]
            if known[name] != here:
                raise GulliverError(
                    f"{self.folder} cannot be resumed: {message} (fingerprint {known[name]}, "
                    f"here {here})"
                )
        begun = with_new_names(type(config), self.options())
        changed = differences(begun, resolved(config), self.may_change)
        if changed:
            raise GulliverError(
                f"{self.folder} cannot be resumed with other options: {'; '.join(changed)}"
            )
        done, steps = int(newest.name.rpartition("-")[2]), getattr(config, "steps", None)
        if steps is not None and steps < done:
            raise GulliverError(
                f"--steps {steps} is less than the {done} steps that {self.folder} already has; "
                "raise it"
            )
        return newest

    def check_writable(self, needed: int) -> None:
        """Rejects a folder that cannot be written, or a disk without `needed` free bytes."""
        with named_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=self.folder):
                pass
        require_space(self.folder, needed)

    def write(self, **values: Any) -> None:
        """Writes options, fingerprints and other facts about the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, values)

    def cut(self, step: int) -> None:
        self.log.cut(step)
        self.samples.cut(step)
