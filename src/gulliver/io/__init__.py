"""Moving bytes between memory and disk, whole or not at all."""

from gulliver.io._atomic import (
    PARTIAL,
    atomic_file,
    cache_folder,
    finish_folder,
    hold,
    lacks_inodes,
    name_folder,
    named_errors,
    remove_all,
    remove_folder,
    remove_leftovers,
    require_space,
    sync,
    write_text,
)
from gulliver.io._default import default_engine
from gulliver.io._engine import Engine, Ticket
from gulliver.io._gather import gather
from gulliver.io._mapped import FileMappings
from gulliver.io._native import NativeEngine, native_problem
from gulliver.io._python import PythonEngine
from gulliver.io._types import BLOCK, Counters, File, IoError, Page, StridedView, check_process
from gulliver.io._yaml import to_yaml

__all__ = [
    "BLOCK",
    "PARTIAL",
    "Counters",
    "Engine",
    "File",
    "FileMappings",
    "IoError",
    "NativeEngine",
    "Page",
    "PythonEngine",
    "StridedView",
    "Ticket",
    "atomic_file",
    "cache_folder",
    "check_process",
    "default_engine",
    "finish_folder",
    "gather",
    "hold",
    "lacks_inodes",
    "name_folder",
    "named_errors",
    "native_problem",
    "remove_all",
    "remove_folder",
    "remove_leftovers",
    "require_space",
    "sync",
    "to_yaml",
    "write_text",
]
