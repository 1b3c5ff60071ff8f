"""Model families: one record per family with everything that is specific to it.

    from gulliver.families import family_of
    family_of(model).sequences.modes

To add a family, add a record: see `docs/families.md`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.families.lookup import family_of as family_of
    from gulliver.families.lookup import register as register
    from gulliver.families.record import SHARED_BY_TENSOR as SHARED_BY_TENSOR
    from gulliver.families.record import Blocks as Blocks
    from gulliver.families.record import Family as Family
    from gulliver.families.record import Sequences as Sequences
    from gulliver.families.record import Tensors as Tensors

__getattr__, __dir__ = lazy_exports(__name__)
