"""A run folder of `gulliver train` or `train-autoencoder`, and what lies in it.

run/
  config.json              the resolved configuration
  plan.yaml                how the model ran
  autoencoder.safetensors  or autoencoder.json, which names a public one
  autoencoder/             log of its training, where it was trained first
  model.json               class and fields of the weights that it began with, where it did
  texts/                   what captions say, where a text encoder reads them
  log.jsonl                a line per logged step
  validation.jsonl         a line per validation: losses of held-out clips by bucket
  clips.json               frame rate of the clips of a table
  samples.jsonl            a line for each time that samples were made
  samples/step-*/          clips of a step, and a contact sheet of them
  tensorboard/
  checkpoints/step-*/      model, optimizer, schedule, average of the weights, position in the data
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.checkpoint import read_json, write_json
from gulliver.errors import GulliverError
from gulliver.jobs import Log
from gulliver.jobs._run_folder import RunFolder
from gulliver.video._config import MAY_CHANGE, TrainConfig, from_plain


@dataclass(frozen=True)
class Run(RunFolder):
    """A folder with a training run."""

    keep: int = 3
    may_change: frozenset[str] = MAY_CHANGE

    @property
    def autoencoder_path(self) -> Path:
        """The autoencoder that the run trains in."""
        return self.folder / "autoencoder.safetensors"

    @property
    def named_autoencoder_path(self) -> Path:
        """The file that says where a public autoencoder lies, which is not copied."""
        return self.folder / "autoencoder.json"

    @property
    def model_path(self) -> Path:
        """The file that says what the weights were that the run began with."""
        return self.folder / "model.json"

    @property
    def validation(self) -> Log:
        """The losses of held-out clips, one JSON object per line."""
        return Log(self.folder / "validation.jsonl")

    @property
    def clips_path(self) -> Path:
        """The file that says what the clips of a table are like."""
        return self.folder / "clips.json"

    def options(self) -> dict[str, Any]:
        """The resolved configuration that the run was begun with, which is all of the file."""
        return self.values()

    def write(self, **values: Any) -> None:
        """Writes the resolved configuration, given as ``options``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, values["options"])

    def cut(self, step: int) -> None:
        """Drops log lines after `step`: a resumed run writes them again."""
        super().cut(step)
        self.validation.cut(step)

    def read_config(self) -> TrainConfig:
        """The configuration that the run was trained with.

        Raises:
            GulliverError: the folder holds no run.
        """
        if not self.config_path.is_file():
            raise GulliverError(
                f"{self.folder} holds no training run (no config.json): "
                "train one with `gulliver train` or `make demo`, or name its folder with --run"
            )
        return from_plain(read_json(self.config_path))

    def newest_checkpoint(self) -> Path:
        """The newest complete checkpoint.

        Raises:
            GulliverError: there is none.
        """
        newest = self.checkpoints.latest()
        if newest is None:
            raise GulliverError(f"{self.folder} holds no complete checkpoint yet")
        return newest
