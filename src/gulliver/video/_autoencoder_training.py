"""Trains the small autoencoder of a run, and keeps autoencoders as files.

The loop is `gulliver.video.autoencoders.AutoencoderTrainer`. By default the loss is the mean square
error of pixels; a little noise on the latents and a weak pull towards zero make neighbouring
latents decode to neighbouring clips, which the diffusion model needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gulliver.checkpoint import read_metadata, read_tensors, write_tensors
from gulliver.comm import World
from gulliver.data import ClipTable
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.video._autoencoder_config import AutoencoderDataConfig, TrainAutoencoderConfig
from gulliver.video._config import AutoencoderConfig
from gulliver.video.autoencoders import (
    AutoencoderTrainer,
    Sources,
    build_autoencoder,
    make_sources,
)

KIND = "gulliver video autoencoder"


def train_autoencoder(
    config: AutoencoderConfig,
    dataset: Any,
    world: World,
    seed: int,
    report: Callable[[float], None],
    unreadable_limit: float = 0.1,
) -> tuple[VideoAutoencoder, dict[str, Any]]:
    """Trains on all ranks together, with the defaults of `gulliver train-autoencoder`."""
    data = AutoencoderDataConfig(batch_size=config.batch_size, unreadable_limit=unreadable_limit)
    options = TrainAutoencoderConfig(
        steps=config.steps, learning_rate=config.learning_rate, seed=seed, data=data
    )
    # All clips of a table are for the diffusion model: none is held out from either of them.
    whole = Sources(dataset, dataset, "the table itself")
    sources = whole if isinstance(dataset, ClipTable) else make_sources(dataset, data, seed)
    model = build_autoencoder(options).to(world.device)
    trainer = AutoencoderTrainer(options, model, sources, world)
    for figures in trainer.steps():
        report(figures["loss"])
    return trainer.finish()


def save_autoencoder(
    path: Path, autoencoder: VideoAutoencoder, figures: dict[str, Any] | None = None
) -> None:
    """Writes weights, statistics and configuration as one safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "kind": KIND,
        "config": json.dumps(autoencoder.config),
        "figures": json.dumps(figures or {}),
    }
    write_tensors(path, autoencoder.state_dict(), metadata)


def load_autoencoder(path: Path) -> VideoAutoencoder:
    """Reads what `save_autoencoder` wrote.

    Raises:
        GulliverError: the file is missing, broken, or something else.
    """
    metadata = read_metadata(path)
    if metadata.get("kind") != KIND:
        raise GulliverError(f"{path} holds no video autoencoder of gulliver")
    autoencoder = VideoAutoencoder(**json.loads(metadata["config"]))
    autoencoder.load_state_dict(read_tensors(path))
    return autoencoder.eval()


def autoencoder_figures(path: Path) -> dict[str, Any]:
    """Reads what was measured when the autoencoder was trained."""
    return json.loads(read_metadata(path).get("figures", "{}"))
