"""The run folder of `gulliver train` and `train-autoencoder`; averaged weights; optimizer.

run/
  config.json              the resolved configuration
  plan.yaml                plan of the run
  autoencoder.safetensors  or autoencoder.json, which refers to a public one
  autoencoder/             log of its training, if it was trained first
  model.json               class and fields of the initial weights, if there were any
  texts/                   caption embeddings, if a text encoder is used
  log.jsonl                a line per logged step
  validation.jsonl         a line per validation: losses of held-out clips by bucket
  clips.json               frame rate of the clips of a table
  samples.jsonl            a line per sampling
  samples/step-*/          clips of a step, and a contact sheet
  tensorboard/
  checkpoints/step-*/      model, optimizer, schedule, averaged weights, position in the data
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json, write_json
from gulliver.checkpoint.tree import as_leaf
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.jobs.log import Log
from gulliver.jobs.loop import rate_factor
from gulliver.jobs.run_folder import RunFolder
from gulliver.memory.parts import Part, part_of, region_of, set_region
from gulliver.memory.pending import before_write
from gulliver.options import from_plain
from gulliver.video.config import MAY_CHANGE, TrainConfig


@dataclass(frozen=True)
class Run(RunFolder):
    """The folder of a training run."""

    keep: int = 3
    may_change: frozenset[str] = MAY_CHANGE

    @property
    def autoencoder_path(self) -> Path:
        return self.folder / "autoencoder.safetensors"

    @property
    def named_autoencoder_path(self) -> Path:
        """The file that refers to a public autoencoder, which is not copied."""
        return self.folder / "autoencoder.json"

    @property
    def model_path(self) -> Path:
        return self.folder / "model.json"

    @property
    def validation(self) -> Log:
        return Log(self.folder / "validation.jsonl")

    @property
    def clips_path(self) -> Path:
        return self.folder / "clips.json"

    def options(self) -> dict[str, Any]:
        return self.values()

    def write(self, **values: Any) -> None:
        """Writes the resolved configuration, passed as ``options``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, values["options"])

    def cut(self, step: int) -> None:
        """Drops log lines after `step`, because a resumed run writes them again."""
        super().cut(step)
        self.validation.cut(step)

    def read_config(self) -> TrainConfig:
        """Reads the configuration of the run."""
        if not self.config_path.is_file():
            raise GulliverError(
                f"{self.folder} has no training run (no config.json); start one with `gulliver "
                "train` or `make demo`, or pass its folder with --run"
            )
        return from_plain(read_json(self.config_path), TrainConfig)

    def newest_checkpoint(self) -> Path:
        """Returns the newest complete checkpoint."""
        newest = self.checkpoints.latest()
        if newest is None:
            raise GulliverError(f"{self.folder} has no complete checkpoint; wait for the first one")
        return newest


# Averaged weights, used for generation.


class ExponentialAverage:
    """An exponential moving average of a model's parameters and buffers, in their own dtype."""

    # The decay warms up as (1 + k) / (10 + k) over steps k, so that the random start is forgotten
    # soon. Ranks with the same parameters have the same average; for a sharded parameter each rank
    # keeps the average of its region.

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        values = model.state_dict(keep_vars=True)
        self.shadow: dict[str, Tensor] = {n: v.detach().clone() for n, v in values.items()}
        for name, value in values.items():
            region = region_of(value)
            if region is not None:
                set_region(self.shadow[name], region)

    def leaves(
        self, replicas: RankGroup = ALONE, writes: Callable[[str, Tensor], bool] | None = None
    ) -> dict[str, Tensor | Part]:
        """Returns the averages to save, by name; shards are parts of their full tensor."""
        if writes is not None:
            own = [name for name, value in self.shadow.items() if writes(name, value)]
            mine = own[replicas.rank :: replicas.size]
            return {name: part_of(self.shadow[name]) for name in mine}
        cut = [name for name, value in self.shadow.items() if region_of(value) is not None]
        others = set(cut) - set(cut[replicas.rank :: replicas.size])
        return {n: as_leaf(v) for n, v in self.shadow.items() if n not in others}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        before_write(self.shadow.values())
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        values = model.state_dict()
        averaged = [name for name, value in values.items() if value.is_floating_point()]
        torch._foreach_lerp_(
            [self.shadow[name] for name in averaged],
            [values[name].detach() for name in averaged],
            1 - decay,
        )
        for name, value in values.items():
            if not value.is_floating_point():
                self.shadow[name].copy_(value)


# The optimizer of a run: AdamW with its learning rate schedule and weight decay groups.


def make_optimizer(
    config: TrainConfig, model: nn.Module
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, config.optimizer.weight_decay),
        lr=config.optimizer.learning_rate,
        betas=(0.9, config.optimizer.beta2),
    )
    warmup, final = config.optimizer.warmup, config.optimizer.final_fraction

    def factor(step: int) -> float:
        return rate_factor(step, config.steps, warmup, final=final)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim >= 2 and p.shape[0] > 6]
    others = [p for p in model.parameters() if not (p.ndim >= 2 and p.shape[0] > 6)]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
