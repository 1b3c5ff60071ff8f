"""Strategies for ``lightning.pytorch``: ``Trainer(strategy="gulliver")``.

    import gulliver.integrations.lightning                       # registers the names
    Trainer(strategy="gulliver")                                 # or "gulliver_zero3", "gulliver_gemini"

    from gulliver.integrations.lightning import GulliverStrategy
    Trainer(strategy=GulliverStrategy(memory_limit="6GiB", disk="/scratch:100GiB"))
"""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from gulliver.integrations._lightning._checkpoints import to_lightning
from gulliver.integrations._lightning._strategy import SharedStrategy

__all__ = ["GulliverStrategy", "to_lightning"]


class GulliverStrategy(SharedStrategy, DDPStrategy):
    __doc__ = SharedStrategy.__doc__


GulliverStrategy.register_strategies(StrategyRegistry)
