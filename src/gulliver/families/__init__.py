"""What is particular to a model family, said once: a record in a file of its own.

    from gulliver.families import family_of
    family_of(model).sequences.modes

Read `_record.py` (what a record says), `_lookup.py` (which record a model has), `llama.py` for one
of them, and `hugging_face.py` for what is done without one. `_loss.py` finds out which loss a model
computes itself. To add a family, add a file: `docs/families.md`.

What it does not know: how anything is cut or run. Tensor, pipeline and sequence parallelism ask
here; nothing here asks them.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.families.lookup import family_of, register
    from gulliver.families.record import SHARED_BY_TENSOR, Blocks, Family, Sequences, Tensors

__all__ = ["SHARED_BY_TENSOR", "Blocks", "Family", "Sequences", "Tensors", "family_of", "register"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.families.lookup": ["family_of", "register"],
        "gulliver.families.record": [
            "Blocks",
            "Family",
            "SHARED_BY_TENSOR",
            "Sequences",
            "Tensors",
        ],
    },
)
