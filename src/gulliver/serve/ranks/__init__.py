"""The engine's model on several processes: tensor ranks within pipeline stages.

Example::

    runner = start_ranks(folder, ModelOptions(tensor=2, pipeline=2), sequences=64)
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.ranks.controller import best_in_flight

__all__ = ["best_in_flight"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.serve.ranks.controller": ["best_in_flight"],
    },
)
