"""booster."""
