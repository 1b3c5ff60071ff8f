"""Checkpoints that are saved while training continues and loaded on any number of ranks.

Saving starts in `saving.py`, loading in `loading.py`; `interchange.py` converts between steps and
Hugging Face folders. Sharded state is represented by `gulliver.memory.parts.Part`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.checkpoint.collect import PerRank
    from gulliver.checkpoint.comparison import compare, verify
    from gulliver.checkpoint.folder import CheckpointFolder
    from gulliver.checkpoint.huggingface import load_huggingface
    from gulliver.checkpoint.interchange import export_huggingface, save_huggingface
    from gulliver.checkpoint.loading import Loaded, load
    from gulliver.checkpoint.saving import AsyncCheckpointer

__all__ = [
    "AsyncCheckpointer",
    "CheckpointFolder",
    "Loaded",
    "PerRank",
    "compare",
    "export_huggingface",
    "load",
    "load_huggingface",
    "save_huggingface",
    "verify",
]

__getattr__, __dir__ = lazy_exports(__name__)
