"""A draft's folder: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from gulliver.checkpoint import read_json, write_json, write_tensors
from gulliver.errors import GulliverError
from gulliver.serve.speculative._glide import Glide, GlideConfig

KIND = "gulliver_glide"
"""``model_type`` of a draft's configuration."""
VERSION = 2
"""Drafts of version 1 took embeddings and what they saw as they were: see [Note: sizes]."""


def is_draft(folder: Path) -> bool:
    """Whether a folder has a draft that `save_draft` wrote."""
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == KIND


def save_draft(
    folder: Path, config: GlideConfig, weights: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Writes a draft."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", weights)
    # Last: a folder with a configuration is whole.
    known = {"model_type": KIND, "version": VERSION, **asdict(config), "training": facts}
    write_json(folder / "config.json", known)


def load_draft(folder: Path) -> Glide:
    """Reads a draft."""
    if not is_draft(folder):
        raise GulliverError(f"{folder} has no draft: gulliver speculate train makes one")
    values = read_json(folder / "config.json")
    _check_version(folder, values)
    names = [field.name for field in fields(GlideConfig)]
    lacking = [name for name in names if name not in values]
    if lacking:
        raise GulliverError(f"{folder}/config.json lacks {lacking[0]}: train the draft again")
    known = {name: values[name] for name in names}
    known |= {name: tuple(known[name]) for name in ("glimpses", "target_sign")}
    weights = load_file(folder / "model.safetensors")
    frequencies = weights.get("target_frequencies")
    model = Glide(GlideConfig(**known), [] if frequencies is None else frequencies.tolist())
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise GulliverError(f"{folder}: {' '.join(str(error).split())[:200]}") from None
    return model.eval()


def _check_version(folder: Path, values: dict[str, Any]) -> None:
    """Refuses a draft that would guess otherwise here than it has learnt to."""
    version = values.get("version", 1)
    if version != VERSION:
        raise GulliverError(
            f"{folder} has a draft of version {version}, and drafts are of version {VERSION} here: "
            "train it again with gulliver speculate train"
        )
