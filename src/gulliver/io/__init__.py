"""Moving bytes between memory and disk, whole or not at all."""

from gulliver.io._atomic import (
    PARTIAL,
    atomic_file,
    cache_folder,
    finish_folder,
    named_errors,
    remove_folder,
    require_space,
    sync,
    write_text,
)
from gulliver.io._yaml import to_yaml

__all__ = [
    "PARTIAL",
    "atomic_file",
    "cache_folder",
    "finish_folder",
    "named_errors",
    "remove_folder",
    "require_space",
    "sync",
    "to_yaml",
    "write_text",
]
