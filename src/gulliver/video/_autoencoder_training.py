"""Autoencoders that were trained here, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gulliver.checkpoint import read_metadata, read_tensors, write_tensors
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder

KIND = "gulliver video autoencoder"


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


def load_trained(path: Path) -> VideoAutoencoder:
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
