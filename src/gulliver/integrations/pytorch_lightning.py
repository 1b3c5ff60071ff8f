"""The strategies of `gulliver.integrations.lightning` for the package ``pytorch_lightning``."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from gulliver.integrations._lightning._checkpoints import to_lightning
from gulliver.integrations._lightning._strategy import SharedStrategy

__all__ = ["GulliverStrategy", "to_lightning"]


class GulliverStrategy(SharedStrategy, DDPStrategy):  # type: ignore[misc]
    """Runs a LightningModule as a plugin plans it; see `SharedStrategy` for the arguments."""


GulliverStrategy.register_strategies(StrategyRegistry)
