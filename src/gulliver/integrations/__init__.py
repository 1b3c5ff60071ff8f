"""Gulliver inside the frameworks that people use: each module is imported on use, none by this package."""
