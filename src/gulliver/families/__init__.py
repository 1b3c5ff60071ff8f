"""Model families: one record per family with everything that is specific to it.

    from gulliver.families import family_of
    family_of(model).sequences.modes

To add a family, add a record: see `docs/families.md`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.families.lookup import family_of, register
    from gulliver.families.record import SHARED_BY_TENSOR, Blocks, Family, Sequences, Tensors

__all__ = ["SHARED_BY_TENSOR", "Blocks", "Family", "Sequences", "Tensors", "family_of", "register"]

__getattr__, __dir__ = lazy_exports(__name__)
