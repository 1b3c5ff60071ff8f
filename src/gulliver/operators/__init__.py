"""Plans that shard and recompute individual operators of any model."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.operators.plans import Program as Program
    from gulliver.operators.plans import find_operators as find_operators

__getattr__, __dir__ = lazy_exports(__name__)
