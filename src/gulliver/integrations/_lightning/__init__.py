"""Parts of ``gulliver.integrations.lightning``: read `_strategy.py` first."""
