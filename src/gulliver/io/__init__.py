"""Asynchronous I/O engines and atomic files."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.io.engine import Engine as Engine
    from gulliver.io.engine import IoError as IoError
    from gulliver.io.engine import Page as Page
    from gulliver.io.files import atomic_file as atomic_file
    from gulliver.io.files import write_text as write_text
    from gulliver.io.native import default_engine as default_engine

__getattr__, __dir__ = lazy_exports(__name__)
