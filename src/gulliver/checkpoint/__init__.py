"""Checkpoints that are saved while training continues and loaded on any number of ranks.

Saving starts in `saving.py`, loading in `loading.py`; `interchange.py` converts between steps and
Hugging Face folders. Sharded state is represented by `gulliver.memory.parts.Part`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.checkpoint.collect import PerRank as PerRank
    from gulliver.checkpoint.comparison import compare as compare
    from gulliver.checkpoint.comparison import verify as verify
    from gulliver.checkpoint.folder import CheckpointFolder as CheckpointFolder
    from gulliver.checkpoint.huggingface import load_huggingface as load_huggingface
    from gulliver.checkpoint.interchange import export_huggingface as export_huggingface
    from gulliver.checkpoint.interchange import save_huggingface as save_huggingface
    from gulliver.checkpoint.loading import Loaded as Loaded
    from gulliver.checkpoint.loading import load as load
    from gulliver.checkpoint.saving import AsyncCheckpointer as AsyncCheckpointer

__getattr__, __dir__ = lazy_exports(__name__)
