"""Saving and loading, whole or not at all."""

from gulliver.checkpoint._collect import PerRank
from gulliver.checkpoint._files import (
    read_json,
    read_metadata,
    read_tensors,
    write_json,
    write_tensors,
)
from gulliver.checkpoint._folder import CheckpointFolder
from gulliver.checkpoint._loading import Loaded, load, step_folder
from gulliver.checkpoint._manifest import Manifest, read_manifest
from gulliver.checkpoint._reader import Mismatch, StepReader
from gulliver.checkpoint._saving import AsyncCheckpointer, Saved
from gulliver.checkpoint._tree import join_state, split_state

__all__ = [
    "AsyncCheckpointer",
    "CheckpointFolder",
    "Loaded",
    "Manifest",
    "Mismatch",
    "PerRank",
    "Saved",
    "StepReader",
    "join_state",
    "load",
    "read_json",
    "read_manifest",
    "read_metadata",
    "read_tensors",
    "split_state",
    "step_folder",
    "write_json",
    "write_tensors",
]
