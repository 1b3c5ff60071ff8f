"""Checkpoints, saved while training goes on and loaded at any number of ranks.

Read `_saving.py`, then `snapshot.py`: a state is taken apart (`collect.py`), copied page by page
(`files.py` plans the files) and published as a step (`publishing.py`, `_folder.py`).
`loading.py`, `_filling.py` and `reader.py` go the other way. `weights.py`, `writing.py` and
`interchange.py` convert between steps and Hugging Face's folders. Bytes are moved by
`gulliver.io`; what ZeRO and model parallelism hold comes here as `gulliver.memory.parts.Part`s.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.checkpoint.collect import PerRank
    from gulliver.checkpoint.comparison import compare, verify
    from gulliver.checkpoint.folder import CheckpointFolder
    from gulliver.checkpoint.huggingface import load_huggingface
    from gulliver.checkpoint.interchange import (
        export_huggingface,
        import_huggingface,
        save_huggingface,
    )
    from gulliver.checkpoint.loading import Loaded, load
    from gulliver.checkpoint.saving import AsyncCheckpointer

__all__ = [
    "AsyncCheckpointer",
    "CheckpointFolder",
    "Loaded",
    "PerRank",
    "compare",
    "export_huggingface",
    "import_huggingface",
    "load",
    "load_huggingface",
    "save_huggingface",
    "verify",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.checkpoint.collect": ["PerRank"],
        "gulliver.checkpoint.comparison": ["compare", "verify"],
        "gulliver.checkpoint.folder": ["CheckpointFolder"],
        "gulliver.checkpoint.huggingface": ["load_huggingface"],
        "gulliver.checkpoint.interchange": [
            "export_huggingface",
            "import_huggingface",
            "save_huggingface",
        ],
        "gulliver.checkpoint.loading": ["Loaded", "load"],
        "gulliver.checkpoint.saving": ["AsyncCheckpointer"],
    },
)
