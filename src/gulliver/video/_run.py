"""A run folder and what lies in it: config, plan, autoencoder, log, checkpoints.

run/
  config.json              the resolved configuration
  plan.yaml                how the model ran
  autoencoder.safetensors  or autoencoder.json, which names a public one
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

from gulliver.checkpoint import CheckpointFolder, read_json, step_folder, write_json
from gulliver.errors import GulliverError
from gulliver.jobs import Log
from gulliver.options import differences, resolved
from gulliver.video._autoencoder_config import TrainAutoencoderConfig
from gulliver.video._config import MAY_CHANGE, TrainConfig, from_plain


@dataclass(frozen=True)
class Run:
    """A folder with a training run."""

    folder: Path
    keep: int = 3
    may_change: frozenset[str] = MAY_CHANGE

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.folder / "config.json"

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
    def log_path(self) -> Path:
        """The log, one JSON object per line."""
        return self.folder / "log.jsonl"

    @property
    def validation(self) -> Log:
        """The losses of held-out clips, one JSON object per line."""
        return Log(self.folder / "validation.jsonl")

    @property
    def samples(self) -> Log:
        """What samples were made of which steps, one JSON object per line."""
        return Log(self.folder / "samples.jsonl")

    @property
    def clips_path(self) -> Path:
        """The file that says what the clips of a table are like."""
        return self.folder / "clips.json"

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints of the run."""
        return CheckpointFolder(self.folder / "checkpoints", keep=self.keep)

    def open(self, config: TrainConfig | TrainAutoencoderConfig) -> Path | None:
        """Prepares the folder for `config`."""
        newest = self.checkpoints.latest()
        if not config.resume:
            if newest is not None:
                raise GulliverError(
                    f"{self.folder} already holds a run ({newest.name}): "
                    "add --resume to continue it, or choose another --out"
                )
            return None
        if newest is None and config.resume_step is None:
            # Stopped before its first checkpoint: what there is to continue is the start.
            return None
        if config.resume_step is not None:
            newest = step_folder(self.checkpoints.root, config.resume_step)
        changed = differences(read_json(self.config_path), resolved(config), self.may_change)
        if changed:
            raise GulliverError(
                f"{self.folder} cannot be resumed with another configuration: {'; '.join(changed)}"
            )
        return newest

    def write_config(self, config: TrainConfig | TrainAutoencoderConfig) -> None:
        """Saves the resolved configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, resolved(config))

    def read_config(self) -> TrainConfig:
        """The configuration that the run was trained with."""
        if not self.config_path.is_file():
            raise GulliverError(
                f"{self.folder} holds no training run (no config.json): "
                "train one with `gulliver train` or `make demo`, or name its folder with --run"
            )
        return from_plain(read_json(self.config_path))

    def newest_checkpoint(self) -> Path:
        """The newest complete checkpoint."""
        newest = self.checkpoints.latest()
        if newest is None:
            raise GulliverError(f"{self.folder} holds no complete checkpoint yet")
        return newest

    def read_log(self) -> list[dict[str, Any]]:
        """Reads the log, a mapping for each logged step."""
        return Log(self.log_path).read()

    def cut_log(self, step: int) -> None:
        """Drops log lines after `step`: a resumed run writes them again."""
        Log(self.log_path).cut(step)
        self.validation.cut(step)
        self.samples.cut(step)

    def append_log(self, line: dict[str, Any]) -> None:
        """Adds a line to the log."""
        Log(self.log_path).append(line)
