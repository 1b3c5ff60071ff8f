"""Asynchronous I/O engines and atomic files."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.io.engine import Engine, IoError, Page
    from gulliver.io.files import atomic_file, write_text
    from gulliver.io.native import default_engine

__all__ = ["Engine", "IoError", "Page", "atomic_file", "default_engine", "write_text"]

__getattr__, __dir__ = lazy_exports(__name__)
