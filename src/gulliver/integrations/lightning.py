"""Strategies for ``lightning.pytorch``: ``Trainer(strategy="gulliver")``.

Importing this module registers the names ``gulliver``, ``gulliver_zero3`` and ``gulliver_gemini``.

Example:
    >>> Trainer(strategy=GulliverStrategy(memory_limit="6GiB", disk="/scratch:100GiB"))
"""

from gulliver.integrations._lightning._checkpoints import to_lightning
from gulliver.integrations._lightning._strategy import GulliverStrategy

__all__ = ["GulliverStrategy", "to_lightning"]
