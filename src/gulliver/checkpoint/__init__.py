"""Saving and loading, whole or not at all."""

from gulliver.checkpoint._files import (
    join_state,
    read_json,
    read_metadata,
    read_tensors,
    split_state,
    write_json,
    write_tensors,
)
from gulliver.checkpoint._folder import CheckpointFolder

__all__ = [
    "CheckpointFolder",
    "join_state",
    "read_json",
    "read_metadata",
    "read_tensors",
    "split_state",
    "write_json",
    "write_tensors",
]
