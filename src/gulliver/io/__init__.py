"""Moving bytes between memory and disk, whole or not at all."""

from gulliver.io._atomic import (
    PARTIAL,
    atomic_file,
    finish_folder,
    named_errors,
    remove_folder,
    require_space,
    sync,
    write_text,
)

__all__ = [
    "PARTIAL",
    "atomic_file",
    "finish_folder",
    "named_errors",
    "remove_folder",
    "require_space",
    "sync",
    "write_text",
]
